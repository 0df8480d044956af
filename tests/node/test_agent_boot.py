"""Where the agent keeps its state, and whose word it takes for that."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from surgeon.node.agent import boot
from surgeon.node.agent.boot import BootError, choose_state, write_private


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The two usual places, moved into a folder of the test."""
    system, home = tmp_path / "var" / "lib" / "surgeon", tmp_path / "home"
    system.parent.mkdir(parents=True)
    home.mkdir()
    monkeypatch.setattr(boot, "SYSTEM_STATE", str(system))
    monkeypatch.setenv("HOME", str(home))
    return system, home / ".local" / "state" / "surgeon"


def test_the_systems_place_comes_first_and_is_private(usual: tuple[Path, Path]) -> None:
    """It is made with mode 0700, and found again."""
    assert choose_state("") == str(usual[0])
    assert usual[0].stat().st_mode & 0o7777 == 0o700
    assert choose_state("") == str(usual[0])
    assert not usual[1].exists()


def test_the_users_place_is_used_when_the_systems_cannot_be_written(usual: tuple[Path, Path]) -> None:
    """A file in the way stands for a place that cannot be made, for root too."""
    usual[0].parent.rmdir()
    usual[0].parent.write_text("in the way", "utf-8")
    assert choose_state("") == str(usual[1])


def test_no_place_at_all_is_said_with_each_reason(usual: tuple[Path, Path]) -> None:
    """Both places and both reasons are named."""
    usual[0].parent.rmdir()
    usual[0].parent.write_text("in the way", "utf-8")
    Path(os.environ["HOME"], ".local").write_text("in the way", "utf-8")
    with pytest.raises(BootError, match="Not a directory") as raised:
        choose_state("")
    assert str(usual[0]) in str(raised.value)
    assert str(usual[1]) in str(raised.value)
    assert "state_dir" in raised.value.error["advice"]


def test_a_folder_that_was_only_too_open_to_readers_is_closed(tmp_path: Path) -> None:
    """0755 is tightened to 0700."""
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    assert choose_state(str(state)) == str(state)
    assert state.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    """What is in there cannot be trusted any more, so it is not just tightened."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(mode)
    with pytest.raises(BootError, match="Others can write"):
        choose_state(str(state))


def test_a_folder_below_one_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """Who can rename the folder above can put another in its place; a sticky bit prevents it."""
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(BootError, match="Others can replace"):
        choose_state(str(above / "state"))
    above.chmod(0o1777)
    assert choose_state(str(above / "state"))


def test_a_folder_above_that_belongs_to_a_private_group_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributions that give each user a group of their own leave homes writable by it."""
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o775)
    user = pwd.getpwuid(os.geteuid()).pw_name

    class Alone:
        gr_name = user
        gr_mem = (user,)

    class Shared:
        gr_name = user
        gr_mem = (user, "somebody")

    monkeypatch.setattr("grp.getgrgid", lambda _gid: Shared)
    with pytest.raises(BootError, match="Others can replace"):
        choose_state(str(above / "state"))
    monkeypatch.setattr("grp.getgrgid", lambda _gid: Alone)
    assert choose_state(str(above / "state"))


def test_a_link_is_refused(tmp_path: Path) -> None:
    """A state directory that is a link could lead anywhere tomorrow."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "real")
    with pytest.raises(BootError, match="a symbolic link"):
        choose_state(str(tmp_path / "state"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """Even root does not keep its state where another user rules."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 1234, 1234)
    with pytest.raises(BootError, match="belongs to uid 1234"):
        choose_state(str(state))
    above = tmp_path / "above"
    above.mkdir(mode=0o755)
    os.chown(above, 1234, 1234)
    with pytest.raises(BootError, match="Others can replace"):
        choose_state(str(above / "state"))


def test_a_relative_path_is_refused() -> None:
    """It would depend on where the login shell happens to start."""
    with pytest.raises(BootError, match="absolute"):
        choose_state("state")


def test_a_private_file_is_written_whole_and_not_through_a_link(tmp_path: Path) -> None:
    """The file is 0600 and replaces a link instead of following it; nothing is left beside it."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "file").symlink_to(victim)
    write_private(str(tmp_path / "file"), b"data")
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "file").read_bytes() == b"data"
    assert (tmp_path / "file").lstat().st_mode & 0o7777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "victim"]


def test_a_private_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk loses neither the old bytes nor leaves half of the new."""
    path = tmp_path / "file"
    write_private(str(path), b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_private(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
