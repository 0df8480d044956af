"""Whether a host's key is the one the user knows it by, and what to do when it is not."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from surgeon.node.ssh_config import HostConfig


@dataclass(frozen=True)
class KnownKey:
    """A line of a known_hosts file that is about the host.

    Attributes:
        path: the file.
        line: its number in it, from 1.
        marker: empty, or ``CA`` or ``REVOKED``.
        kind: the key's type, such as ``ssh-ed25519``.
        key: the key in base64.
    """

    path: Path
    line: int
    marker: str
    kind: str
    key: str


def find_known(name: str, files: Sequence[Path]) -> list[KnownKey]:
    """Return what known_hosts files say about a host, in order, as OpenSSH matches it (hashes and patterns too).

    Args:
        name: the host as it stands there, ``host`` or ``[host]:port``.
        files: the files to look in; those that are not there are passed over.
    """
    known: list[KnownKey] = []
    for path in files:
        if not path.is_file():
            continue
        command = ["ssh-keygen", "-F", name, "-f", str(path)]
        done = subprocess.run(command, check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=20)
        number, marker = 0, ""
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            if line.startswith("# Host "):
                words = line.partition(" found: line ")[2].split()
                number, marker = int(words[0]), " ".join(words[1:])
                continue
            fields = line.split()
            fields = fields[1:] if fields and fields[0].startswith("@") else fields
            if len(fields) > 2:  # noqa: PLR2004 - names, type, key
                known.append(KnownKey(path, number, marker, fields[1], fields[2]))
    return known


def fingerprint(key: bytes) -> str:
    """Return a key's fingerprint as ``ssh`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode("ascii").rstrip("=")


def check_host_key(config: HostConfig, known: Sequence[KnownKey], kind: str, key: bytes, *, accept_new: bool) -> None:
    """Let a host's key pass, or say what is wrong with it.

    Args:
        config: how the host is reached.
        known: what known_hosts says about it.
        kind: the type of the key it showed.
        key: that key, as it goes over the wire.
        accept_new: write the key of an unknown host down and let it pass.

    Raises:
        UnreachableError: the key has changed, is revoked, or is not known.
    """
    shown = base64.b64encode(key).decode("ascii")
    for entry in known:
        if entry.marker == "REVOKED" and entry.key == shown:
            raise UnreachableError(
                f"The host key of {config.known_as} ({fingerprint(key)}) is marked as revoked.",
                advice="Do not connect; ask whoever runs the node for its present key.",
                where=f"{entry.path}:{entry.line}",
            )
    plain = [entry for entry in known if not entry.marker]
    if any(entry.kind == kind and entry.key == shown for entry in plain):
        return
    if plain:
        raise _changed(config, plain, kind, key)
    if not accept_new:
        raise _unknown(config, kind, key)
    _write_down(config, kind, shown)


def _changed(config: HostConfig, plain: Sequence[KnownKey], kind: str, key: bytes) -> UnreachableError:
    entry = next((entry for entry in plain if entry.kind == kind), plain[0])
    found = fingerprint(base64.b64decode(entry.key))
    mend = f"ssh-keygen -R '{config.known_as}' -f '{entry.path}'"
    return UnreachableError(
        f"The host key of {config.known_as} has changed: {entry.path} line {entry.line} has {entry.kind} {found}, "
        f"the host shows {kind} {fingerprint(key)}.",
        advice=f"If the node was reinstalled and you trust it, forget the old key: {mend}",
        where=f"{entry.path}:{entry.line}",
    )


def _unknown(config: HostConfig, kind: str, key: bytes) -> UnreachableError:
    return UnreachableError(
        f"The host key of {config.known_as} is not known; it shows {kind} {fingerprint(key)}.",
        advice=f"Check that fingerprint, then connect once with `ssh {config.alias}`, or let surgeon write it down "
        "with --accept-new.",
        where=config.alias,
    )


def _write_down(config: HostConfig, kind: str, shown: str) -> None:
    if not config.user_known_hosts:
        return
    path = config.user_known_hosts[0]
    name = config.known_as
    if config.hash_known_hosts:
        from paramiko.hostkeys import HostKeys

        name = HostKeys.hash_host(name)
    line = f"{name} {kind} {shown}\n".encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("ab+") as file:
            size = file.tell()
            if size:
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
    except OSError as error:
        raise UnreachableError(
            f"The new host key of {name} cannot be written down: {error.strerror}.",
            advice="Make that file writable, or connect once with ssh.",
            where=str(path),
        ) from error
