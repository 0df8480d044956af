"""A package index, and the releases of sglang that it has; asked with pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from surgeon.errors import SurgeonError
from surgeon.registry import settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# sglang 0.5.23's wheel is built for CPython 3.11 only, older ones for any Python 3: this asks for either,
# whatever interpreter runs surgeon.
WHEEL_PYTHON: Final = "3.11"
_WHEEL_PLATFORM = "manylinux_2_34_x86_64"
_ASK_TIMEOUT_S = 60.0
_SOCKET_TIMEOUT_S = 10

# Which index is asked is said by name; a setting of this machine must not add another to it.
_CHOOSING = (
    "INDEX_URL",
    "EXTRA_INDEX_URL",
    "FIND_LINKS",
    "NO_INDEX",
    "CONSTRAINT",
    "REQUIREMENT",
    "TIMEOUT",
    "RETRIES",
)
_CHOOSING_VARIABLES = {f"PIP_{name}" for name in (*_CHOOSING, "DEFAULT_TIMEOUT")}


@dataclass(frozen=True)
class Index:
    """A package index.

    Attributes:
        url: its address; credentials in it are this machine's own.
        source: the variable or file that names it; empty for pip's default.
        reach: what pip needs to get there from here, by option.
        own: it is the one that this machine's own settings name.
    """

    url: str
    source: str
    reach: Mapping[str, str]
    own: bool

    @property
    def shown(self) -> str:
        """The address without credentials."""
        return settings.without_credentials(self.url)


class RegistryError(SurgeonError):
    """The index did not answer, or not with what was asked for."""

    code = "registry"


def own() -> Index:
    """The index of this machine.

    Raises:
        RegistryError: pip is told to use none.
    """
    found = settings.look(dict(os.environ), sys.prefix, [])
    if found["no_index"]:
        raise RegistryError(
            "this machine's pip is told to use no index (no-index)",
            advice="name one: PIP_NO_INDEX= PIP_INDEX_URL=https://...",
        )
    return Index(_checked(found["url"]), found["source"], found["reach"], own=True)


def named(url: str, source: str) -> Index:
    """The index that a node names, to be asked from here.

    Args:
        url: as the node says it, without credentials; if this machine's own settings name the same one, theirs are
            used.
        source: what names it there.

    Raises:
        RegistryError: it is not one that can be asked from elsewhere.
    """
    mine = settings.look(dict(os.environ), sys.prefix, [])
    if settings.without_credentials(mine["url"]).rstrip("/") == url.rstrip("/"):
        return Index(_checked(mine["url"]), mine["source"], mine["reach"], own=not mine["no_index"])
    return Index(_checked(url), source, mine["reach"], own=False)


def _checked(url: str) -> str:
    if not re.match(r"https?://[^\s/]", url):
        raise RegistryError(
            f"the index is {settings.without_credentials(url)!r}; expected an address that begins with https:// or "
            "http://, which is the same from everywhere",
            advice="say another with PIP_INDEX_URL",
        )
    return url


def releases(index: Index) -> tuple[Version, ...]:
    """The releases of sglang that an index has, the newest first; candidates and development builds left out.

    Raises:
        RegistryError: it has none, or could not be asked.
    """
    arguments = ("index", "versions", "-vv", "--only-binary=:all:", *target(), "sglang")
    answer = run(index, arguments, timeout_s=_ASK_TIMEOUT_S)
    listed = re.search(r"^Available versions: (.+)$", answer, re.MULTILINE)
    found = []
    for word in listed[1].split(",") if listed else ():
        try:
            version = Version(word.strip())
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            found.append(version)
    if not found:
        raise RegistryError(f"{index.shown} lists no release of sglang", advice=_ADVICE, where=index.shown)
    return tuple(sorted(found, reverse=True))


def target() -> tuple[str, ...]:
    """The words that make pip look for a node's wheels."""
    return ("--python-version", WHEEL_PYTHON, *(() if sys.platform == "linux" else ("--platform", _WHEEL_PLATFORM)))


_ADVICE = "look at the network and at the index's settings (`pip config list`)"

# What pip says, in the order in which it tells the reason best, and what that is in plain words.
_REASONS = (
    (r"\b401 Client Error|\b403 Client Error|User for .*:", "it wants credentials that this machine does not have"),
    (r"\b404 Client Error", "it has no sglang (404)"),
    (r"\b5\d\d Server Error|too many \d+ error responses", "it answered with a server error"),
    (r"timed out|[Tt]imeout", "it did not answer in time"),
    (r"Name or service not known|nodename nor servname|[Nn]ame resolution|getaddrinfo failed", "its name is not known"),
    (r"Connection refused|Errno 111", "the connection was refused"),
    (r"SSLError|CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted here"),
    (r"ProxyError|Tunnel connection failed", "the proxy did not let it through"),
    (r"Network is unreachable|No route to host", "there is no way to it from here"),
)


def run(index: Index, arguments: Sequence[str], *, timeout_s: float) -> str:
    """Run pip against one index, and no other.

    Args:
        index: the index.
        arguments: pip's, from the command on.
        timeout_s: seconds after which it is given up.

    Returns:
        What it printed.

    Raises:
        RegistryError: with the reason in plain words.
    """
    options = [f"--{name}={value}" for name, values in index.reach.items() for value in values.split()]
    parts = urlsplit(index.url)
    if parts.scheme == "http":
        # What is fetched is read and never run, and the node trusts that host with more.
        options.append(f"--trusted-host={parts.netloc.rpartition('@')[2]}")
    command = [
        *(sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input", "--no-color"),
        *("--index-url", index.url, "--timeout", str(_SOCKET_TIMEOUT_S), "--retries", "1", *options),
    ]
    environ = {name: value for name, value in os.environ.items() if name not in _CHOOSING_VARIABLES}
    try:
        done = subprocess.run(
            command,
            env={**environ, "PIP_CONFIG_FILE": os.devnull},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RegistryError(
            f"{index.shown} could not be asked: pip was not done after {timeout_s:.0f} s",
            advice=_ADVICE,
            where=index.shown,
        ) from error
    if done.returncode == 0:
        return done.stdout
    raise RegistryError(
        f"{index.shown} could not be asked: {_reason(done.stdout + done.stderr)}", advice=_ADVICE, where=index.shown
    )


def _reason(said: str) -> str:
    if "No module named pip" in said:
        return "the Python that runs surgeon has no pip; install it there"
    for pattern, words in _REASONS:
        if re.search(pattern, said):
            return words
    last = [line for line in said.splitlines() if line.strip()][-1:] or ["pip said nothing"]
    return re.sub(r"(://)[^/@\s]+@", r"\1****@", last[0])
