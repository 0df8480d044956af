"""The way to a node over SSH, through Fabric, set up as the user's own ``ssh`` would be."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import paramiko
from fabric import Config, Connection

from surgeon.errors import UnreachableError
from surgeon.node.host_keys import KnownKey, check_host_key, find_known
from surgeon.node.ssh_auth import OpenSshOrder
from surgeon.node.ssh_config import HostConfig, resolve
from surgeon.node.transport import Completed, Transport, cut, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.node.target import Target

# Paramiko logs what it raises as well; without a handler that would land on the user's terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_CHUNK = 1 << 16
_KEEPALIVE_S = 15
_DEAD_LINK_MS = 45_000


class BeyondParamikoError(UnreachableError):
    """The host did not let us in this way; the user's own ``ssh`` might still get in."""


class _SpeechlessError(UnreachableError):
    """The other end of the connection said nothing, or nothing that SSH is made of."""


class _CheckedKeys(paramiko.MissingHostKeyPolicy):
    """Asks our own reading of known_hosts; Paramiko's, left empty, finds every host's key missing."""

    def __init__(self, config: HostConfig, known: Sequence[KnownKey], *, accept_new: bool) -> None:
        self._config = config
        self._known = known
        self._accept_new = accept_new

    def missing_host_key(self, _client: paramiko.SSHClient, _hostname: str, key: paramiko.PKey) -> None:
        """Let the key pass or raise what is wrong with it."""
        check_host_key(self._config, self._known, key.get_name(), key.asbytes(), accept_new=self._accept_new)


class SshTransport(Transport):
    """One SSH connection; each command is a channel on it."""

    def __init__(self, name: str, connection: Connection, proxy: _Proxy | None) -> None:
        self.name = name
        self.round_trips = 0
        self._connection = connection
        self._proxy = proxy

    def run(self, argv: Sequence[str], *, stdin: bytes, deadline_s: float) -> Completed:
        """Run a command on the node: quoted once, here, for the login shell that reads it there.

        Raises:
            UnreachableError: the connection broke, or the deadline passed.
        """
        self.round_trips += 1
        limit = time.monotonic() + deadline_s
        transport = self._connection.transport
        try:
            channel = transport.open_session(timeout=deadline_s)
            with channel:
                channel.settimeout(deadline_s)
                channel.exec_command(shlex.join(argv))
                return self._exchange(channel, stdin, limit)
        except TimeoutError as error:
            raise silent(self.name, deadline_s) from error
        except UnreachableError:
            raise
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise cut(self.name) from error

    def _exchange(self, channel: paramiko.Channel, stdin: bytes, limit: float) -> Completed:
        """Feed a command and read both its streams at once, so that neither side waits for the other."""
        complaints = bytearray()

        def feed() -> None:
            # A command may end without having read everything.
            with suppress(OSError, EOFError, paramiko.SSHException):
                channel.sendall(stdin)
                channel.shutdown_write()

        def listen() -> None:
            with suppress(OSError, EOFError, paramiko.SSHException):
                while data := channel.recv_stderr(_CHUNK):
                    complaints.extend(data)

        threads = [threading.Thread(target=work, daemon=True) for work in (feed, listen)]
        for thread in threads:
            thread.start()
        try:
            answer = bytearray()
            while data := _read(channel, limit):
                answer.extend(data)
            if not channel.status_event.wait(max(0.0, limit - time.monotonic())):
                raise TimeoutError
            threads[1].join(max(0.0, limit - time.monotonic()))
        finally:
            channel.close()
            for thread in threads:
                thread.join()
        if channel.exit_status == -1 and not self._connection.transport.is_active():
            raise cut(self.name)
        return Completed(channel.exit_status, bytes(answer), bytes(complaints))

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._connection.close()
        if self._proxy is not None:
            self._proxy.close()


def _read(channel: paramiko.Channel, limit: float) -> bytes:
    left = limit - time.monotonic()
    if left <= 0:
        raise TimeoutError
    channel.settimeout(left)
    return channel.recv(_CHUNK)


class _Proxy:
    """A program whose standard streams are the connection, as ``ssh`` has them for jump hosts."""

    def __init__(self, config: HostConfig) -> None:
        ours, theirs = socket.socketpair()
        command = list(config.proxy or ())
        if config.proxy_shell:
            command = [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {config.proxy_shell}"]
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the program
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._complaints
            )
        self.socket = ours
        self.words = shlex.join(command)

    def said(self) -> str:
        """Return the last of what the program complained about."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._complaints.seek(0)
        lines = self._complaints.read().decode("utf-8", "replace").strip().splitlines()
        return " ".join(line.strip() for line in lines[-3:])

    def close(self) -> None:
        """End the program."""
        self.socket.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._complaints.close()


def open_ssh(target: Target) -> SshTransport:
    """Connect to a target.

    Raises:
        BeyondParamikoError: the host refused every key, or is known by a certificate.
        UnreachableError: the host cannot be reached, or its key is not the one it is known by.
        UsageError: the host's name is none.
    """
    config = resolve(target)
    # What was typed or configured for surgeon bounds the connection; ssh's own limit does when it is tighter.
    timeout = min(target.connect_timeout_s, config.connect_timeout_s or target.connect_timeout_s)
    known = find_known(config.known_as, [*config.user_known_hosts, *config.global_known_hosts])
    if known and all(entry.marker == "CA" for entry in known):
        raise BeyondParamikoError(
            f"{config.known_as} is known by a certificate authority, which cannot be checked this way.",
            advice=f"Make `ssh {target.host} true` work without a prompt.",
            where=target.host,
        )
    accept_new = config.accept_new or target.host_key_policy == "accept-new"
    proxy = _Proxy(config) if config.proxy or config.proxy_shell else None
    try:
        sock = proxy.socket if proxy is not None else _dial(config, timeout)
        connection = _log_in(config, known, sock, timeout, accept_new=accept_new)
    except _SpeechlessError as error:
        raise _hop_failed(config, proxy) if proxy is not None else error from error.__cause__
    except BaseException:
        if proxy is not None:
            proxy.close()
        raise
    return SshTransport(target.host, connection, proxy)


def _hop_failed(config: HostConfig, proxy: _Proxy) -> UnreachableError:
    """Say what the way through another host failed of, and close it."""
    said = proxy.said() or "it said nothing"
    proxy.close()
    return UnreachableError(
        f"{config.alias} cannot be reached through `{proxy.words}`: {said}.",
        advice=f"Make `ssh {config.alias} true` work first; it is the way there that fails.",
        where=config.alias,
    )


def _dial(config: HostConfig, timeout_s: float) -> socket.socket:
    place = f"{config.alias} ({config.hostname} port {config.port})"
    try:
        sock = socket.create_connection((config.hostname, config.port), timeout_s)
    except socket.gaierror as error:
        name = config.hostname if config.hostname == config.alias else f"{config.hostname} of {config.alias}"
        raise UnreachableError(
            f"The name {name} cannot be resolved: {error.strerror}.",
            advice="Check the name, or add a Host entry to the ssh configuration.",
            where=config.alias,
        ) from error
    except TimeoutError as error:
        raise UnreachableError(
            f"{place} did not take a connection within {timeout_s:.0f} s.",
            advice="Check that the node is up and that nothing on the way drops the traffic.",
            where=config.alias,
        ) from error
    except OSError as error:
        raise UnreachableError(
            f"{place} cannot be reached: {error.strerror or error}.",
            advice="Check that the node is up and that its SSH server listens on that port.",
            where=config.alias,
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_LINK_MS)
    return sock


def _log_in(
    config: HostConfig, known: Sequence[KnownKey], sock: socket.socket, timeout_s: float, *, accept_new: bool
) -> Connection:
    def known_kinds_first(*args: Any, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(*args, **options)
        security = transport.get_security_options()
        kinds = [kind for entry in known if not entry.marker for kind in _algorithms(entry.kind)]
        first = [kind for kind in dict.fromkeys(kinds) if kind in security.key_types]
        security.key_types = (*first, *(kind for kind in security.key_types if kind not in first))
        return transport

    order = OpenSshOrder(config)
    connection = Connection(
        config.hostname,
        user=config.user,
        port=config.port,
        # Fabric's own files, and its partial reading of ssh's configuration, have no say.
        config=Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        forward_agent=config.forward_agent,
        connect_kwargs={
            "sock": sock,
            "timeout": timeout_s,
            "banner_timeout": timeout_s,
            "auth_timeout": max(timeout_s, 60.0) if order.has_agent else timeout_s,
            "channel_timeout": timeout_s,
            "transport_factory": known_kinds_first,
            "auth_strategy": order,
        },
    )
    connection.client.set_missing_host_key_policy(_CheckedKeys(config, known, accept_new=accept_new))
    try:
        connection.open()
        connection.transport.set_keepalive(_KEEPALIVE_S)
    except BaseException as error:
        connection.client.close()
        sock.close()
        if isinstance(error, paramiko.AuthenticationException):
            raise _refused(config, order) from error
        # Our own word on the host's key is a ConnectionError, too.
        if isinstance(error, (paramiko.SSHException, EOFError, OSError)) and not isinstance(error, UnreachableError):
            raise _SpeechlessError(
                f"{config.alias} ({config.hostname} port {config.port}) does not speak SSH with us: "
                f"{error or 'it hung up'}.",
                advice=f"Check what `ssh -v {config.alias} true` says.",
                where=config.alias,
            ) from error
        raise
    finally:
        order.close()
    return connection


def _algorithms(kind: str) -> tuple[str, ...]:
    """Return the signature algorithms that a known_hosts key type stands for."""
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def _refused(config: HostConfig, order: OpenSshOrder) -> BeyondParamikoError:
    tried = ", ".join(order.tried) or "no key"
    locked = ", ".join(str(path) for path in order.locked)
    return BeyondParamikoError(
        f"{config.alias} does not let {config.user} in; tried {tried}"
        + (f"; {locked} needs its passphrase" if locked else "")
        + ".",
        advice=f"Unlock the key with `ssh-add {locked}`."
        if locked
        else f"Make `ssh {config.alias} true` work without a prompt: add your public key there, or ssh-add it here.",
        where=config.alias,
    )
