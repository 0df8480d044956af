"""Real SSH servers on the loopback, with keys and a client configuration of their own."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh

from surgeon.node.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def tool(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run one of OpenSSH's own programs, without a terminal, and return what came of it."""
    return subprocess.run(
        [shutil.which(program) or program, *arguments],
        check=False,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        env={**os.environ, **environment},
    )


def make_key(path: Path, kind: str = "ed25519") -> Path:
    """Make a key pair without a passphrase and return the private half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tool("ssh-keygen", "-q", "-t", kind, "-N", "", "-C", path.name, "-f", str(path)).check_returncode()
    return path


def free_port() -> int:
    """Return a port of the loopback that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class SshNode:
    """A running SSH server and the client's files that lead to it.

    Attributes:
        folder: holds everything below.
        port: where the server listens on 127.0.0.1.
        key: the client's private key, which the server knows.
        host_key: the server's private host key; ``.pub`` beside it.
        known_hosts: the client's file of host keys, which has this one.
        config: the client's ssh configuration with a ``Host node``.
        home: the home directory of OpenSSH's sessions, whose start-up files are the test's to write.
        state_dir: an empty directory name for the agent's state.
        pid: the process of the server, when it has one of its own.
    """

    folder: Path
    port: int
    key: Path
    host_key: Path
    known_hosts: Path
    config: Path
    home: Path
    state_dir: Path
    pid: int | None = None
    extra: list[str] = field(default_factory=list)

    @property
    def target(self) -> Target:
        """The target that means this node, with strict host keys."""
        return Target("node", ssh_config=self.config, state_dir=str(self.state_dir), connect_timeout_s=10)

    @property
    def public_host_key(self) -> str:
        """Type and base64 of the server's host key."""
        return " ".join(self.host_key.with_suffix(".pub").read_text("utf-8").split()[:2])

    def log(self) -> str:
        """What the server wrote so far."""
        return (self.folder / "sshd.log").read_text("utf-8", "replace")

    def sessions(self) -> list[int]:
        """The processes that serve the connections of this moment."""
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(status.read_text("utf-8").rpartition(")")[2].split()[1]) == self.pid:
                    found.append(int(status.parent.name))
        return found

    def know(self, name: str | None = None, key: str | None = None) -> None:
        """Make the client's known_hosts say that ``name`` has ``key``; by default what is true."""
        line = f"{name or f'[127.0.0.1]:{self.port}'} {key or self.public_host_key}\n"
        self.known_hosts.write_text(line, "utf-8")

    def configure(self, *, host: str = "node", **options: str) -> None:
        """Write the client's configuration: what leads to the server, changed by ``options``."""
        settings = {
            "HostName": "127.0.0.1",
            "Port": str(self.port),
            "User": getpass.getuser(),
            "IdentityFile": str(self.key),
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": str(self.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            **options,
        }
        lines = [f"    {keyword} {value}" for keyword, value in settings.items()]
        self.config.write_text("\n".join([f"Host {host}", *lines, *self.extra, ""]), "utf-8")


def _layout(folder: Path, kind: str) -> SshNode:
    node = SshNode(
        folder=folder,
        port=free_port(),
        key=make_key(folder / "client_key"),
        host_key=make_key(folder / "host_key", kind),
        known_hosts=folder / "known_hosts",
        config=folder / "ssh_config",
        home=folder / "home",
        state_dir=folder / "state",
    )
    node.home.mkdir()
    node.know()
    node.configure()
    return node


def _await_port(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        if process is not None and process.poll() is not None:
            break
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"no SSH server came up on port {port}")


@contextlib.contextmanager
def openssh_node(folder: Path, *, host_key: str = "ed25519", options: tuple[str, ...] = ()) -> Iterator[SshNode]:
    """Run OpenSSH's sshd.

    Args:
        folder: an empty directory.
        host_key: the type of the server's key.
        options: further lines of its configuration.
    """
    node = _layout(folder, host_key)
    authorized = folder / "authorized_keys"
    authorized.write_bytes(node.key.with_suffix(".pub").read_bytes())
    settings = [
        "ListenAddress 127.0.0.1",
        f"Port {node.port}",
        f"HostKey {node.host_key}",
        f"AuthorizedKeysFile {authorized}",
        f"PidFile {folder / 'sshd.pid'}",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        f"SetEnv HOME={node.home}",
        *options,
    ]
    configuration = folder / "sshd_config"
    configuration.write_text("\n".join([*settings, ""]), "utf-8")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(configuration)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        _await_port(node.port, process)
        node.pid = process.pid
        yield node
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def asyncssh_node(folder: Path) -> Iterator[SshNode]:
    """Run asyncssh's server in a thread: a second implementation of the protocol, which needs no sshd."""
    node = _layout(folder, "ed25519")
    loop = asyncio.new_event_loop()
    connections: list[asyncssh.SSHServerConnection] = []
    children: set[int] = set()
    tasks: list[asyncio.Task[None] | None] = []

    class Server(asyncssh.SSHServer):
        def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
            connections.append(conn)

    async def serve(process: asyncssh.SSHServerProcess[bytes]) -> None:
        child = await asyncio.create_subprocess_shell(
            process.command or "true",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        children.add(child.pid)
        tasks.append(asyncio.current_task())
        stdout, stderr = await child.communicate(await process.stdin.read())
        children.discard(child.pid)
        process.stdout.write(stdout)
        process.stderr.write(stderr)
        process.exit(child.returncode or 0)

    async def start() -> asyncssh.SSHAcceptor:
        return await asyncssh.create_server(
            Server,
            "127.0.0.1",
            node.port,
            server_host_keys=[str(node.host_key)],
            authorized_client_keys=str(node.key.with_suffix(".pub")),
            process_factory=serve,
            encoding=None,
        )

    async def stop(server: asyncssh.SSHAcceptor) -> None:
        server.close()
        await server.wait_closed()
        for connection in connections:
            connection.abort()
            await connection.wait_closed()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        # Transports close themselves in the loop's next rounds.
        await asyncio.sleep(0.05)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield node
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Listen on a port, take connections, and never say a word."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(8)
        yield int(sock.getsockname()[1])
