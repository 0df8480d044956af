"""The lab's SSH server on loopback, with keys, known_hosts and a client configuration of its own."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surgeon.errors import SurgeonError, UsageError
from surgeon.lab import processes

HOST = "lab"
"""The name that ``--host`` and the client configuration know the node by."""

Kind = Literal["openssh", "asyncssh"]
_START_TIMEOUT_S = 20.0
_SEPARATION_FOLDER = Path("/run/sshd")


@dataclass(frozen=True)
class SshServer:
    """A running SSH server.

    Attributes:
        kind: which implementation.
        pid: of the listening process.
        port: on 127.0.0.1.
        client_config: a file for ``ssh -F``, which knows the host `HOST`.
        reused: whether it ran already.
    """

    kind: Kind
    pid: int
    port: int
    client_config: Path
    reused: bool


def choose_kind() -> Kind:
    """OpenSSH's sshd where it is installed, else asyncssh; ``SURGEON_LAB_SSHD`` forces one.

    Raises:
        UsageError: the variable names neither.
        SurgeonError: what is forced, or everything, is missing.
    """
    forced = os.environ.get("SURGEON_LAB_SSHD")
    if forced not in {None, "", "openssh", "asyncssh"}:
        raise UsageError(f"SURGEON_LAB_SSHD is openssh or asyncssh, not {forced!r}.")
    if forced != "asyncssh" and find_sshd() is not None:
        return "openssh"
    if forced != "openssh" and importlib.util.find_spec("asyncssh") is not None:
        return "asyncssh"
    raise SurgeonError(
        f"The lab needs {forced or 'an SSH server'}, and it is not installed.",
        advice="Install OpenSSH's server (openssh-server on Debian and Ubuntu) or `pip install 'surgeon[lab]'`.",
        code="lab-ssh",
    )


def find_sshd() -> Path | None:
    """OpenSSH's sshd, by its absolute path, which it insists on being started by."""
    found = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
    return Path(found).absolute() if found else None


def start(folder: Path) -> SshServer:
    """Start the SSH server, unless it runs already and is of the kind wanted.

    Args:
        folder: where its keys, configuration, log and pid file are kept; made private.

    Returns:
        The server. It accepts connections.

    Raises:
        SurgeonError: it did not come up.
    """
    kind = choose_kind()
    running = find(folder)
    if running is not None and running.kind == kind:
        return running
    stop(folder)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _make_key(folder / "host_key")
    _make_key(folder / "user_key")
    shutil.copyfile(folder / "user_key.pub", folder / "authorized_keys")
    port = free_port()
    (folder / "port").write_text(f"{port}\n", encoding="ascii")
    _write_client_configuration(folder, port)
    command = _openssh_command(folder, port) if kind == "openssh" else _asyncssh_command(folder, port)
    log = folder / "server.log"
    pid = processes.detach(command, log=log, cwd=Path("/"))
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and processes.look_up(pid) is not None:
        started = find(folder)
        if started is not None and _banner(port):
            return SshServer(started.kind, started.pid, port, started.client_config, reused=False)
        time.sleep(0.05)
    stop(folder)
    log_lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    raise SurgeonError(
        f"The lab's SSH server ({kind}) did not come up: {log_lines[-1] if log_lines else 'it said nothing'}",
        advice=f"Its log is {log}; SURGEON_LAB_SSHD=asyncssh or openssh chooses the other kind.",
        code="lab-ssh",
    )


def find(folder: Path) -> SshServer | None:
    """The SSH server that runs from that folder, or None.

    Args:
        folder: as given to `start`.
    """
    try:
        pid = int((folder / "server.pid").read_text(encoding="ascii"))
        port = int((folder / "port").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    process = processes.look_up(pid)
    # The number may be another process's by now; the server's command line names our folder.
    if process is None or not any(str(folder) in word for word in process.argv):
        return None
    kind: Kind = "asyncssh" if any("asyncssh_server" in word for word in process.argv) else "openssh"
    return SshServer(kind, pid, port, folder / "ssh_config", reused=True)


def stop(folder: Path) -> bool:
    """Stop the SSH server and the sessions it serves.

    Args:
        folder: as given to `start`.

    Returns:
        Whether there was one.
    """
    running = find(folder)
    if running is not None:
        processes.end(processes.descendants({running.pid}), grace_s=5.0)
    (folder / "server.pid").unlink(missing_ok=True)
    return running is not None


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _banner(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _make_key(path: Path) -> None:
    # paramiko, which surgeon's own SSH stands on, brings cryptography; ssh-keygen may be missing.
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if path.exists():
        return
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b" surgeon-lab\n")
    path.touch(mode=0o600)
    path.write_bytes(private)


def _write_client_configuration(folder: Path, port: int) -> None:
    host_key = (folder / "host_key.pub").read_text(encoding="ascii").split()[:2]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(host_key)}\n", encoding="ascii")
    lines = [
        f"Host {HOST}",
        "  HostName 127.0.0.1",
        f"  Port {port}",
        f"  User {getpass.getuser()}",
        f'  IdentityFile "{folder / "user_key"}"',
        "  IdentitiesOnly yes",
        f'  UserKnownHostsFile "{folder / "known_hosts"}"',
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        "  BatchMode yes",
    ]
    (folder / "ssh_config").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _openssh_command(folder: Path, port: int) -> list[str]:
    sshd = find_sshd()
    if sshd is None:
        raise SurgeonError("sshd is gone.", code="lab-ssh")
    if os.geteuid() == 0:
        # sshd run by root wants this folder, which only a service manager would have made.
        _SEPARATION_FOLDER.mkdir(mode=0o755, exist_ok=True)
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f'HostKey "{folder / "host_key"}"',
        f'AuthorizedKeysFile "{folder / "authorized_keys"}"',
        f'PidFile "{folder / "server.pid"}"',
        f"AllowUsers {getpass.getuser()}",
        "AuthenticationMethods publickey",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "UsePAM no",
        "StrictModes no",
        "UseDNS no",
        "PrintMotd no",
        "Subsystem sftp internal-sftp",
        # A test may open many connections at once.
        "MaxStartups 100",
        "MaxSessions 100",
    ]
    configuration = folder / "sshd_config"
    configuration.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str(sshd), "-D", "-e", "-f", str(configuration)]


def _asyncssh_command(folder: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "surgeon.lab.asyncssh_server", "--port", str(port)),
        *("--host-key", str(folder / "host_key"), "--authorized-keys", str(folder / "authorized_keys")),
        *("--pid-file", str(folder / "server.pid")),
    ]
