"""Which settings the runtime believes, and what it does where it believes none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tests.patches.oea.conftest import Installed

STATE = 'print(json.dumps({"active": oea.active, "k0": oea._NOW.loaded.settings.k0}))'


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"k0": 65}, "k0: expected an integer in 0..64, found 65"),
        ({"k0": -1}, "k0: expected"),
        ({"k0": True}, "k0: expected"),
        ({"k0": 4.0}, "k0: expected"),
        ({"k0": "4"}, "k0: expected"),
        ({"refill": "both"}, "refill: expected one of native, strict, none"),
        ({"refill": ["native"]}, "refill: expected"),
        ({"enabled": 1}, "enabled: expected true or false"),
        ({"min_rows": 9, "max_rows": 8}, "min_rows 9 is more than max_rows 8"),
        ({"k_0": 4}, "k_0: no such setting"),
        ({"schema": "surgeon/oea-settings/2"}, "schema: expected surgeon/oea-settings/1"),
        ({"beacon_dir": "beacons"}, "beacon_dir: expected an absolute path"),
        ({"k0": 99, "stats": "yes"}, "k0: expected an integer in 0..64, found 99; stats: expected"),
    ],
)
def test_one_bad_setting_keeps_it_off(
    settings: dict[str, Any], said: str, install: Callable[..., Installed], load: Callable[..., ModuleType]
) -> None:
    """A value out of range, of the wrong type or unknown turns the whole file down, by name."""
    loaded = load()._settings.read_settings(install(**settings).settings, {})
    assert not loaded.settings.enabled
    assert said in loaded.problem


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 50000, '{"k0": 4}', "\ufffe", " " * 70000 + "{}"])
def test_what_is_not_a_settings_file_keeps_it_off(
    content: str, install: Callable[..., Installed], load: Callable[..., ModuleType]
) -> None:
    """Broken, empty, deep, oversized or unlabelled content is a problem that is told, not an exception."""
    file = install().settings
    file.write_bytes(content.encode("utf-16") if content == "\ufffe" else content.encode())
    loaded = load()._settings.read_settings(file, {})
    assert not loaded.settings.enabled
    assert loaded.problem


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o664])
def test_a_file_that_another_could_write_is_refused(
    mode: int, install: Callable[..., Installed], load: Callable[..., ModuleType]
) -> None:
    """Group- or world-writable settings are not believed."""
    file = install(k0=4).settings
    file.chmod(mode)
    loaded = load()._settings.read_settings(file, {})
    assert not loaded.settings.enabled
    assert f"mode {mode:04o}" in loaded.problem


def test_a_file_of_another_user_is_refused(install: Callable[..., Installed], load: Callable[..., ModuleType]) -> None:
    """Settings that belong to neither this process's user nor root are not believed."""
    file = install(k0=4).settings
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 12345, -1)
    loaded = load()._settings.read_settings(file, {})
    assert not loaded.settings.enabled
    assert "owner 12345" in loaded.problem


def test_links_and_pipes_are_refused(
    install: Callable[..., Installed], load: Callable[..., ModuleType], tmp_path: Path
) -> None:
    """A symbolic link is not followed and a named pipe does not hang the server's start."""
    link, pipe = tmp_path / "link.json", tmp_path / "pipe.json"
    link.symlink_to(install(k0=4).settings)
    os.mkfifo(pipe, 0o600)
    for path in (link, pipe, tmp_path / "absent.json"):
        loaded = load()._settings.read_settings(path, {})
        assert not loaded.settings.enabled
        assert loaded.problem.startswith(path.name)


@pytest.mark.parametrize(
    ("settings", "value", "k0", "enabled", "source", "complains"),
    [
        ({"k0": 4}, None, 4, True, "file", False),
        ({"k0": 4}, "6", 6, True, "environment", False),
        ({"k0": 4}, "0", 0, False, "environment", False),
        ({"k0": 4, "enabled": False}, "6", 6, True, "environment", False),
        ({"k0": 0}, "6", 6, True, "environment", False),
        ({"k0": 4}, "-1", 4, True, "file", True),
        ({"k0": 4}, "many", 4, True, "file", True),
        ({"k0": 4}, "", 4, True, "file", True),
        ({"k0": 4}, "4.0", 4, True, "file", True),
        ({"k0": 4}, "9" * 5000, 4, True, "file", True),
        ({"k0": 4}, "٤", 4, True, "file", True),
        ({"k0": 4, "bad": 1}, "6", 0, False, "file", True),
    ],
)
def test_the_environment_overrides_k0(
    *,
    settings: dict[str, Any],
    value: str | None,
    k0: int,
    enabled: bool,
    source: str,
    complains: bool,
    install: Callable[..., Installed],
    load: Callable[..., ModuleType],
) -> None:
    """SGLANG_OEA_K0 wins over switch and k0 of a good file; nonsense in it is ignored and told."""
    environ = {} if value is None else {"SGLANG_OEA_K0": value}
    loaded = load()._settings.read_settings(install(**settings).settings, environ)
    assert (loaded.settings.k0, loaded.settings.enabled, loaded.source) == (k0, enabled, source)
    assert (loaded.problem is not None) == complains


def test_the_environments_k0_takes_the_place_of_a_schedule(
    install: Callable[..., Installed], load: Callable[..., ModuleType]
) -> None:
    """One number in the environment holds for every batch, whatever ranges the file has; 0 is off."""
    file = install(k0_schedule=[[1, 2, 8], [3, 64, 4]]).settings
    read = load()._settings.read_settings
    assert read(file, {}).settings.operator_policy.schedule == ((1, 2, 8), (3, 64, 4))
    assert read(file, {"SGLANG_OEA_K0": "6"}).settings.operator_policy.schedule == ((3, 64, 6),)
    assert not read(file, {"SGLANG_OEA_K0": "0"}).settings.is_on


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2]],
        [[1, 2, 3, 4]],
        [[0, 2, 3]],
        [[3, 2, 1]],
        [[1, 2, 65]],
        [[1, 2, -1]],
        [[1, 2, True]],
        [[1, 2.0, 3]],
        [[1, 4097, 3]],
        [[5, 6, 1], [1, 2, 1]],
        {"1": 2},
        "1-2:3",
        None,
        [[n, n, 1] for n in range(1, 66)],
    ],
)
def test_a_schedule_is_believed_as_a_whole(
    value: Any, install: Callable[..., Installed], load: Callable[..., ModuleType]
) -> None:
    """Ranges out of order, overlapping, out of range or of the wrong kind keep the patch off."""
    loaded = load()._settings.read_settings(install(k0_schedule=value).settings, {})
    assert not loaded.settings.is_on
    assert "k0_schedule: expected a list of [low, high, k0] in rising order without overlap" in loaded.problem


def test_a_process_obeys_the_file_and_the_environment(install: Callable[..., Installed]) -> None:
    """A fresh interpreter is on as the file says, off with SGLANG_OEA_K0=0, and off leaves no beacon."""
    installed = install(k0=3)
    assert installed.run(STATE).answer == {"active": True, "k0": 3}
    off = installed.run(STATE, SGLANG_OEA_K0="0")
    assert off.answer == {"active": False, "k0": 0}
    assert off.err == ""
    assert not installed.beacons.exists()


def test_a_process_with_bad_settings_says_so_at_once(install: Callable[..., Installed]) -> None:
    """Refused settings leave the patch off, and the beacon is written at import since route will never be called."""
    installed = install(k0=99, generation=7)
    ended = installed.run(STATE)
    assert ended.answer["active"] is False
    assert "k0: expected an integer in 0..64, found 99" in ended.err
    beacon = json.loads((installed.beacons / f"{ended.pid}.json").read_text())
    assert (beacon["state"], beacon["applied"], beacon["generation"]) == ("off", False, 7)
    assert "k0: expected an integer in 0..64, found 99" in beacon["settings_problem"]


def test_a_process_without_settings_says_so_where_the_node_keeps_beacons(
    install: Callable[..., Installed], tmp_path: Path
) -> None:
    """With no settings file to name a folder, the beacon goes to the user's state folder if surgeon made it."""
    if Path("/var/lib/surgeon/beacons").is_dir():
        pytest.skip("this machine has a node's state folder of its own, which comes first")
    installed = install()
    installed.settings.unlink()
    usual = tmp_path / "home" / ".local" / "state" / "surgeon" / "beacons"
    usual.mkdir(parents=True, mode=0o700)
    ended = installed.run(STATE, HOME=str(tmp_path / "home"), SGLANG_OEA_K0="4")
    assert ended.answer == {"active": False, "k0": 0}
    beacon = json.loads((usual / f"{ended.pid}.json").read_text())
    assert "_surgeon_oea.json" in beacon["settings_problem"]
