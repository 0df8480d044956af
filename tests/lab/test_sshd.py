"""The lab's SSH server, of both kinds, as OpenSSH's own client and paramiko see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import paramiko
import pytest

from surgeon.errors import UsageError
from surgeon.lab import processes, sshd
from tests.support.ssh import make_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from surgeon.lab.sshd import SshServer

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")


@pytest.fixture(scope="module", params=["openssh", "asyncssh"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server's folder, with a server of each kind running from it in turn."""
    if request.param == "openssh" and sshd.find_sshd() is None:
        pytest.skip("needs OpenSSH's sshd")
    place: Path = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SURGEON_LAB_SSHD", request.param)
        sshd.start(place)
        yield place
        sshd.stop(place)


def running(folder: Path) -> SshServer:
    """The server that runs from a folder."""
    found = sshd.find(folder)
    assert found is not None
    return found


def ssh(folder: Path, command: str, sent: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command through OpenSSH's client and the lab's own client configuration."""
    words = ["ssh", "-F", str(running(folder).client_config), sshd.HOST, command]
    return subprocess.run(words, input=sent, capture_output=True, check=False, timeout=60)


def test_the_clients_configuration_is_enough_to_get_in(folder: Path) -> None:
    """`ssh -F CONFIG lab true` works with strict host keys and asks nothing."""
    done = ssh(folder, "true")
    assert (done.returncode, done.stderr) == (0, b"")


def test_exit_status_and_both_streams_come_back(folder: Path) -> None:
    """The command's status, its output and its errors arrive apart."""
    done = ssh(folder, "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_bytes_pass_unchanged_both_ways(folder: Path) -> None:
    """Two megabytes of every byte value come back as they were sent."""
    sent = bytes(range(256)) * 8192
    assert ssh(folder, "cat", sent).stdout == sent


def test_a_command_that_a_signal_ends_is_no_success(folder: Path) -> None:
    """OpenSSH's client answers 255 for a signal."""
    assert ssh(folder, "kill -9 $$").returncode == 255


def test_files_pass_through_sftp(folder: Path, tmp_path: Path) -> None:
    """A file goes up and comes down through SFTP, byte for byte."""
    content = os.urandom(300_000)
    (tmp_path / "here").write_bytes(content)
    batch = f"put {tmp_path}/here {tmp_path}/there\nget {tmp_path}/there {tmp_path}/back\n"
    words = ["sftp", "-F", str(running(folder).client_config), "-b", "-", sshd.HOST]
    done = subprocess.run(words, input=batch.encode(), capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "back").read_bytes() == content


def test_one_connection_carries_several_channels_at_once(folder: Path) -> None:
    """Channels of one connection run side by side: the last one opened ends the first ones' wait."""
    server = running(folder)
    with paramiko.SSHClient() as client:
        client.load_host_keys(str(folder / "known_hosts"))
        client.connect(
            "127.0.0.1",
            port=server.port,
            key_filename=str(folder / "user_key"),
            allow_agent=False,
            look_for_keys=False,
        )
        flag = folder / "flag"
        wait = f"while [ ! -e {flag} ]; do sleep 0.05; done; echo seen"
        waiting = [client.exec_command(wait, timeout=30)[1] for _ in range(3)]
        client.exec_command(f"touch {flag}")[1].channel.recv_exit_status()
        assert [stream.read() for stream in waiting] == [b"seen\n"] * 3
    flag.unlink()


def test_a_stranger_is_not_let_in(folder: Path, tmp_path: Path) -> None:
    """Another key, and no key, are refused."""
    make_key(tmp_path / "other")
    configuration = running(folder).client_config.read_text(encoding="utf-8")
    other = tmp_path / "config"
    other.write_text(configuration.replace(str(folder / "user_key"), str(tmp_path / "other")), encoding="utf-8")
    words = ["ssh", "-F", str(other), sshd.HOST, "true"]
    done = subprocess.run(words, capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 255
    assert b"ermission denied" in done.stderr


def test_the_private_key_is_private(folder: Path) -> None:
    """Keys are readable by their owner only."""
    assert [(folder / name).stat().st_mode & 0o777 for name in ("user_key", "host_key")] == [0o600, 0o600]


def test_a_running_server_is_reused(folder: Path) -> None:
    """A second start finds the first one's server."""
    before = running(folder)
    again = sshd.start(folder)
    assert (again.pid, again.port, again.reused) == (before.pid, before.port, True)


def test_stopping_leaves_no_process_and_no_session(tmp_path: Path) -> None:
    """The listener goes, and so does the session it was serving."""
    server = sshd.start(tmp_path)
    words = ["ssh", "-F", str(server.client_config), sshd.HOST, "sleep 300"]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        deadline = time.monotonic() + 20
        while not any(process.argv[-1:] == ("300",) for process in processes.descendants({server.pid})):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = processes.descendants({server.pid})
        assert sshd.stop(tmp_path)
        assert client.wait(timeout=20) != 0
    assert [process for process in family if processes.alive(process)] == []
    assert sshd.find(tmp_path) is None
    assert not sshd.stop(tmp_path)


def test_a_stale_pid_file_names_no_server(tmp_path: Path) -> None:
    """Where the number now belongs to another process, that process is neither found nor stopped."""
    (tmp_path / "server.pid").write_text(f"{os.getpid()}\n", encoding="ascii")
    (tmp_path / "port").write_text("22\n", encoding="ascii")
    assert sshd.find(tmp_path) is None
    assert not sshd.stop(tmp_path)


def test_an_unknown_kind_of_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that forces a kind accepts the two kinds."""
    monkeypatch.setenv("SURGEON_LAB_SSHD", "dropbear")
    with pytest.raises(UsageError, match="openssh or asyncssh, not 'dropbear'"):
        sshd.choose_kind()
