"""Which keys are offered to a host, in the order in which OpenSSH offers them."""

from __future__ import annotations

import base64
import binascii
import contextlib
import socket
from typing import TYPE_CHECKING

import paramiko
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import AuthSource, AuthStrategy, InMemoryPrivateKey, NoneAuth
from paramiko.pkey import UnknownKeyType

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from surgeon.node.ssh_config import HostConfig


class _Agent(AgentSSH):
    """An SSH agent behind a socket that the configuration names, where Paramiko knows the usual one only."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(60)  # a key on a token may wait for a touch
        with contextlib.suppress(OSError, paramiko.SSHException):
            self._socket.connect(path)
            self._connect(self._socket)  # type: ignore[attr-defined] # not in the stubs

    def close(self) -> None:
        """Let go of the agent."""
        self._socket.close()


class OpenSshOrder(AuthStrategy):
    """The agent's keys that the configuration names, its other keys, the key files, then no key at all.

    Attributes:
        tried: what was offered, in words, for the message that says none was taken.
        locked: key files that need a passphrase, which only an agent can supply here.
    """

    def __init__(self, config: HostConfig) -> None:
        super().__init__(ssh_config=paramiko.SSHConfig())
        self._config = config
        self._agent = _Agent(config.identity_agent) if config.identity_agent else None
        self.tried: list[str] = []
        self.locked: list[Path] = []

    @property
    def has_agent(self) -> bool:
        """Whether an agent is asked, which may wait for a touch of a token."""
        return self._agent is not None

    def close(self) -> None:
        """Let go of the agent."""
        if self._agent is not None:
            self._agent.close()

    def get_sources(self) -> Iterator[AuthSource]:
        """Yield what to try, in order."""
        named = {blob for path in self._config.identity_files if (blob := _public(path)) is not None}
        held = list(self._agent.get_keys()) if self._agent is not None else []
        matching = [key for key in held if key.blob in named]
        others = [] if self._config.identities_only else [key for key in held if key.blob not in named]
        for key in [*matching, *others]:
            self.tried.append(f"agent key {key.comment or key.name}")
            yield InMemoryPrivateKey(self._config.user, key)
        offered = {key.blob for key in matching}
        for path in self._config.identity_files:
            if _public(path) in offered or path.suffix == ".pub" or not path.is_file():
                continue
            loaded = self._load(path)
            if loaded is not None:
                self.tried.append(str(path))
                yield InMemoryPrivateKey(self._config.user, loaded)
        yield NoneAuth(self._config.user)

    def _load(self, path: Path) -> paramiko.PKey | None:
        try:
            return paramiko.PKey.from_path(path)
        except TypeError:
            # How the cryptography library says that a passphrase is needed.
            self.locked.append(path)
        except paramiko.PasswordRequiredException:
            self.locked.append(path)
        except (paramiko.SSHException, UnknownKeyType, OSError, ValueError):
            self.tried.append(f"{path} (not readable as a key)")
        return None


def _public(path: Path) -> bytes | None:
    """Return the public half of a key file, as it goes over the wire, if it lies there or beside."""
    candidate = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    try:
        fields = candidate.read_text("utf-8", "replace").split()
        return base64.b64decode(fields[1], validate=True)
    except (OSError, IndexError, binascii.Error):
        return None
