"""What the user's ``ssh`` would do for a host, as ``ssh -G`` tells it."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from surgeon.node.target import Target

_RESOLVE_TIMEOUT_S = 20


@dataclass(frozen=True)
class HostConfig:
    """How to reach one host.

    Attributes:
        alias: the name that was asked for.
        hostname: the name or address to connect to.
        port: its port.
        user: who to log in as.
        identity_files: keys to try, in order, whether or not they exist; one may be the public half of an agent's key.
        identities_only: try no key of the agent that is not one of the files.
        identity_agent: the socket of the agent; None for none.
        user_known_hosts: where known host keys are, the user's files.
        global_known_hosts: the same, the system's files.
        host_key_alias: the name under which the host's key is known, instead of its own.
        hash_known_hosts: new host keys are written down under a hash of the name.
        accept_new: the user's configuration lets unknown hosts in.
        proxy: the command whose streams are the connection, to be run as it stands; None for a direct one.
        proxy_shell: the same as a line for the user's shell; None for none.
        forward_agent: the agent is handed on to the node.
        connect_timeout_s: seconds; None when the configuration does not say.
    """

    alias: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    identity_agent: str | None
    user_known_hosts: tuple[Path, ...]
    global_known_hosts: tuple[Path, ...]
    host_key_alias: str | None
    hash_known_hosts: bool
    accept_new: bool
    proxy: tuple[str, ...] | None
    proxy_shell: str | None
    forward_agent: bool
    connect_timeout_s: float | None

    @property
    def known_as(self) -> str:
        """The name under which the host's key stands in known_hosts."""
        name = self.host_key_alias or self.hostname
        return name if self.port == 22 or self.host_key_alias else f"[{name}]:{self.port}"  # noqa: PLR2004 - SSH's port


def ssh_command(target: Target) -> list[str]:
    """Return ``ssh`` with the options that choose the user's configuration."""
    return ["ssh", *(["-F", str(target.ssh_config)] if target.ssh_config else [])]


def resolve(target: Target) -> HostConfig:
    """Ask ``ssh`` how it would reach a target.

    Raises:
        UsageError: the host's name is none, or the configuration does not parse.
        UnreachableError: there is no ``ssh`` here.
    """
    if not target.host or target.host.startswith("-") or any(character.isspace() for character in target.host):
        raise UsageError(f"A host is a name that ssh knows, found {target.host!r}.", advice="Give --host a name.")
    try:
        done = subprocess.run(
            [*ssh_command(target), "-G", "--", target.host],
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_RESOLVE_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise UnreachableError(
            "There is no ssh here to ask how to reach the node.", advice="Install the OpenSSH client."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"ssh -G {target.host} did not end within {_RESOLVE_TIMEOUT_S} s.",
            advice="Look for a Match exec in the ssh configuration that hangs.",
            where=target.host,
        ) from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise UsageError(
            f"ssh cannot make sense of its configuration for {target.host}: {said}",
            advice="Make `ssh -G` work for this host first.",
            where=target.host,
        )
    return parse(done.stdout.decode("utf-8", "replace"), target)


def parse(text: str, target: Target) -> HostConfig:
    """Read the output of ``ssh -G``.

    Args:
        text: lines of a keyword and its value; a keyword may come several times.
        target: what was asked about.
    """
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.strip().partition(" ")
        options.setdefault(keyword.lower(), []).append(value.strip())

    def one(keyword: str) -> str | None:
        value = options.get(keyword, [""])[0]
        return None if value.lower() in {"", "none"} else value

    tokens = {
        "%": "%",
        "d": str(Path.home()),
        "h": one("hostname") or target.host,
        "i": str(os.getuid()),
        "L": socket.gethostname().partition(".")[0],
        "l": socket.gethostname(),
        "n": target.host,
        "p": one("port") or "22",
        "r": one("user") or getpass.getuser(),
        "u": getpass.getuser(),
        "k": one("hostkeyalias") or one("hostname") or target.host,
    }

    def paths(keyword: str) -> tuple[Path, ...]:
        words = [word for value in options.get(keyword, []) for word in value.split()]
        return tuple(Path(expand(word, tokens)).expanduser() for word in words if word.lower() != "none")

    identities = tuple(
        Path(expand(value, tokens)).expanduser()
        for value in options.get("identityfile", [])
        if value.lower() not in {"", "none"}
    )
    timeout = one("connecttimeout")
    jump, proxy_command = one("proxyjump"), one("proxycommand")
    return HostConfig(
        alias=target.host,
        hostname=tokens["h"],
        port=int(tokens["p"]),
        user=tokens["r"],
        identity_files=identities,
        identities_only=one("identitiesonly") == "yes",
        identity_agent=_agent(options.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        user_known_hosts=paths("userknownhostsfile"),
        global_known_hosts=paths("globalknownhostsfile"),
        host_key_alias=one("hostkeyalias"),
        hash_known_hosts=one("hashknownhosts") == "yes",
        accept_new=one("stricthostkeychecking") in {"accept-new", "no", "off", "false"},
        proxy=_jump(jump, tokens, target) if jump else None,
        proxy_shell=expand(proxy_command, tokens) if proxy_command and not jump else None,
        forward_agent=one("forwardagent") == "yes",
        connect_timeout_s=float(timeout) if timeout and timeout.isdigit() else None,
    )


def expand(value: str, tokens: dict[str, str]) -> str:
    """Replace ssh's ``%h`` and its like; a token that is not known stays as it is."""
    parts = value.strip('"').split("%")
    expanded, rest = parts[0], iter(parts[1:])
    for part in rest:
        if part == "":
            # "%%" splits into an empty part and what follows it.
            expanded += "%" + next(rest, "")
        else:
            expanded += tokens.get(part[0], "%" + part[0]) + part[1:]
    return expanded


def _agent(value: str, tokens: dict[str, str]) -> str | None:
    if value.lower() == "none":
        return None
    if value.startswith("$"):
        return os.environ.get(value[1:].strip("{}")) or None
    if value in {"", "SSH_AUTH_SOCK"}:
        return os.environ.get("SSH_AUTH_SOCK") or None
    return str(Path(expand(value, tokens)).expanduser())


def _jump(hops: str, tokens: dict[str, str], target: Target) -> tuple[str, ...]:
    """Return the ``ssh`` that reaches the host through its last jump host, itself through those before."""
    *before, last = hops.split(",")
    command = [*ssh_command(target), "-o", "BatchMode=yes"]
    if target.host_key_policy == "accept-new":
        command += ["-o", "StrictHostKeyChecking=accept-new"]
    if before:
        command += ["-J", ",".join(before)]
    host = tokens["h"]
    address = f"[{host}]:{tokens['p']}"
    hop = last if last.startswith("ssh://") else f"ssh://{last}"
    return (*command, "-W", address, "--", hop)
