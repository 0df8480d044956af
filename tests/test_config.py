"""Which node a command talks to: who wins over whom, where the file is found, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from surgeon import config
from surgeon.config import Settings
from surgeon.errors import UsageError
from surgeon.node.target import Target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE = """
host = "from-file"
port = 30001
python = "/file/bin/python"
state_dir = "/file/state"

[profile.glm5]
host = "from-profile"
port = 30002
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder without any surgeon.toml above it, and a user's configuration folder that is empty."""
    folder = tmp_path / "home" / "project" / "deep"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / ".config"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def refused(given: Settings, *, profile: str | None = None, environ: Mapping[str, str] | None = None) -> UsageError:
    """The refusal of these settings, which must be a matter of usage."""
    with pytest.raises(UsageError) as caught:
        config.resolve(given, profile=profile, environ=environ or {})
    assert caught.value.exit_code == 2
    return caught.value


def test_options_win_over_environment_over_profile_over_defaults(home: Path) -> None:
    """Each source fills only what the ones before it left unsaid."""
    (home / "surgeon.toml").write_text(FILE)
    target = config.resolve(
        Settings(host="from-options"), profile="glm5", environ={"SURGEON_HOST": "from-env", "SURGEON_PORT": "30003"}
    )
    assert target == Target("from-options", python="/file/bin/python", state_dir="/file/state", port=30003)


@pytest.mark.parametrize(
    ("environ", "profile", "host", "port"),
    [
        ({"SURGEON_HOST": "from-env"}, "glm5", "from-env", 30002),
        ({}, "glm5", "from-profile", 30002),
        ({"SURGEON_PROFILE": "glm5"}, None, "from-profile", 30002),
        ({}, None, "from-file", 30001),
        ({"SURGEON_HOST": ""}, None, "from-file", 30001),
    ],
)
def test_what_is_not_said_comes_from_the_next_source(
    home: Path, environ: dict[str, str], profile: str | None, host: str, port: int
) -> None:
    """Without options the environment speaks, then the profile, then the file's top; an empty variable is silent."""
    (home / "surgeon.toml").write_text(FILE)
    target = config.resolve(Settings(), profile=profile, environ=environ)
    assert (target.host, target.port) == (host, port)


@pytest.mark.usefixtures("home")
def test_a_host_alone_gives_strict_keys_and_fifteen_seconds() -> None:
    """The defaults: host keys are checked strictly, a connection has 15 s, and nothing else is assumed."""
    assert config.resolve(Settings(host="gpu1"), environ={}) == Target("gpu1", connect_timeout_s=15.0)
    assert config.resolve(Settings(host="gpu1"), environ={}).host_key_policy == "strict"


def test_accept_new_is_taken_from_every_source(home: Path) -> None:
    """`accept-new` may be an option, a variable or a key of the file."""
    for given_, environ in (
        (Settings(host="gpu1", host_key_policy="accept-new"), {}),
        (Settings(host="gpu1"), {"SURGEON_HOST_KEY_POLICY": "accept-new"}),
    ):
        assert config.resolve(given_, environ=environ).host_key_policy == "accept-new"
    (home / "surgeon.toml").write_text('host = "gpu1"\nhost_key_policy = "accept-new"\n')
    assert config.resolve(Settings(), environ={}).host_key_policy == "accept-new"


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ('ssh_config = "keys/ssh_config"', {}, "{home}/keys/ssh_config"),
        ('ssh_config = "~/other_config"', {}, "{home}/other_config"),
        ('ssh_config = "/etc/lab/ssh_config"', {}, "/etc/lab/ssh_config"),
        ('ssh_config = "keys/ssh_config"', {"SURGEON_SSH_CONFIG": "~/from_env"}, "{home}/from_env"),
        ("", {}, None),
    ],
)
def test_another_ssh_configuration_is_named_like_ssh_minus_f(
    home: Path, text: str, environ: dict[str, str], expected: str | None
) -> None:
    """A path in the file is relative to the file, wherever surgeon is called from; ``~`` is the user's home."""
    (home / "surgeon.toml").write_text(text)
    target = config.resolve(Settings(host="gpu1"), environ=environ)
    assert (str(target.ssh_config) if target.ssh_config else None) == (expected and expected.format(home=home))


def test_the_file_is_found_in_parents_and_the_nearest_one_wins(home: Path) -> None:
    """A surgeon.toml above the current folder counts, unless a nearer one is there."""
    (home / "surgeon.toml").write_text('host = "far"\n')
    assert config.resolve(Settings(), environ={}).host == "far"
    (home / "project" / "surgeon.toml").write_text('host = "near"\n')
    assert config.resolve(Settings(), environ={}).host == "near"


def test_the_users_folder_is_the_last_place_to_look(home: Path) -> None:
    """Without a surgeon.toml in the current folder or above it, the user's configuration folder has the word."""
    own = home / ".config" / "surgeon"
    own.mkdir(parents=True)
    (own / "surgeon.toml").write_text('host = "mine"\n')
    assert config.find_file({}) == own / "surgeon.toml"
    (home / "project" / "surgeon.toml").write_text('host = "project"\n')
    assert config.find_file({}) == home / "project" / "surgeon.toml"


def test_surgeon_config_names_the_file_and_must_exist(home: Path) -> None:
    """SURGEON_CONFIG wins over every place that is searched; naming nothing is refused, not skipped."""
    (home / "surgeon.toml").write_text('host = "searched"\n')
    named = home / "other.toml"
    named.write_text('host = "named"\n')
    assert config.resolve(Settings(), environ={"SURGEON_CONFIG": str(named)}).host == "named"
    error = refused(Settings(), environ={"SURGEON_CONFIG": str(home / "gone.toml")})
    assert "gone.toml" in error.message
    assert error.where == "SURGEON_CONFIG"


@pytest.mark.usefixtures("home")
def test_no_host_says_the_three_ways_to_name_one() -> None:
    """Without a host anywhere the refusal lists the option, the variable and the file, and points to the lab."""
    error = refused(Settings(port=30000))
    for way in ("--host", "SURGEON_HOST", "surgeon.toml"):
        assert way in error.message
    assert "surgeon lab up" in error.advice


def test_an_unknown_profile_is_refused_with_the_known_ones(home: Path) -> None:
    """The refusal names the file and the profiles that are in it."""
    (home / "surgeon.toml").write_text(FILE)
    error = refused(Settings(), profile="glm4")
    assert "'glm4'" in error.message
    assert "glm5" in error.message
    assert str(home / "surgeon.toml") in error.message


@pytest.mark.usefixtures("home")
def test_a_profile_without_a_file_is_refused() -> None:
    """A profile that is asked for where no surgeon.toml is found is not silently dropped."""
    assert "found: none" in refused(Settings(host="gpu1"), profile="glm5").message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('hots = "gpu1"', ("hots", "host_key_policy")),
        ('[profile.glm5]\nhots = "gpu1"', ("hots",)),
        ("host = 3", ("host", "3", "text")),
        ('host = ""', ("host", "text")),
        ('port = "many"', ("port", "'many'", "1..65535")),
        ("port = true", ("port", "True")),
        ("port = 0", ("port", "1..65535")),
        ("port = 65536", ("port", "1..65535")),
        ("port = 30000.5", ("port", "whole number")),
        ("connect_timeout_s = -1", ("connect_timeout_s", "1..3600")),
        ('host_key_policy = "no"', ("host_key_policy", "'strict'", "'accept-new'")),
        ('profile = "glm5"', ("profile", "[profile.NAME]")),
        ("[profile]\nglm5 = 1", ("profile", "[profile.NAME]")),
        ("host = ", ("surgeon.toml", "TOML")),
    ],
)
def test_what_makes_no_sense_in_the_file_is_refused_by_name(home: Path, text: str, words: tuple[str, ...]) -> None:
    """An unknown key, a value of the wrong kind or out of range: the file and the key are named."""
    path = home / "surgeon.toml"
    path.write_text(text + "\n")
    error = refused(Settings(host="gpu1"), profile="glm5" if "profile.glm5" in text else None)
    for word in (str(path), *words):
        assert word in error.message


def test_bytes_that_are_no_text_are_refused(home: Path) -> None:
    """A surgeon.toml in another encoding is named, not a traceback."""
    (home / "surgeon.toml").write_bytes(b'host = "gp\xfc1"\n')
    assert "surgeon.toml" in refused(Settings()).message


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("settings", "environ", "key"),
    [
        (Settings(host="gpu1"), {"SURGEON_PORT": "http"}, "port"),
        (Settings(host="gpu1"), {"SURGEON_CONNECT_TIMEOUT_S": "2.5"}, "connect_timeout_s"),
        (Settings(host="gpu1"), {"SURGEON_HOST_KEY_POLICY": "yes"}, "host_key_policy"),
        (Settings(host="gpu1", port=70000), {}, "port"),
    ],
)
def test_what_makes_no_sense_outside_the_file_is_refused_too(
    settings: Settings, environ: dict[str, str], key: str
) -> None:
    """The same ranges hold for variables and options."""
    assert refused(settings, environ=environ).where == key


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("port", "seconds"), [(1, 3600), (30000, 60), (65535, 1)])
def test_numbers_from_the_environment_arrive_as_numbers(port: int, seconds: int) -> None:
    """A variable is text; the target's port and seconds are not, up to both ends of their ranges."""
    environ = {"SURGEON_HOST": "gpu1", "SURGEON_PORT": str(port), "SURGEON_CONNECT_TIMEOUT_S": str(seconds)}
    target = config.resolve(Settings(), environ=environ)
    assert (target.port, target.connect_timeout_s) == (port, float(seconds))


def test_profiles_lists_every_target_with_the_defaults_filled_in(home: Path) -> None:
    """`surgeon hosts` sees the file's own host under the empty name, and each profile over the defaults."""
    path = home / "surgeon.toml"
    path.write_text(FILE)
    default = Settings(host="from-file", port=30001, python="/file/bin/python", state_dir="/file/state")
    glm5 = Settings(host="from-profile", port=30002, python="/file/bin/python", state_dir="/file/state")
    assert config.profiles({}) == (path, {"": default, "glm5": glm5})
    path.write_text('python = "/opt/python"\n')
    assert config.profiles({}) == (path, {})


@pytest.mark.usefixtures("home")
def test_without_a_file_there_are_no_profiles() -> None:
    """No file is no error: any name of the ssh configuration works as a host."""
    assert config.profiles({}) == (None, {})
