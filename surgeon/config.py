"""Which node a command talks to: options, then SURGEON_* variables, then surgeon.toml.

``surgeon.toml`` is looked for in the current folder and its parents, then in the user's configuration folder.
Top-level keys are defaults; ``[profile.NAME]`` tables override them. How the node is reached (ports, identities,
jumps) stays in the user's ssh configuration, which is honoured exactly as ``ssh`` does; ``ssh_config`` names another
file for it, as ``ssh -F`` does.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surgeon.node.target import Target

FILE_NAME: Final = "surgeon.toml"
LAB_HOST: Final = "lab"
_NUMBERS: Final = {"port": range(1, 65536), "connect_timeout_s": range(1, 3601)}
_POLICIES: Final = ("strict", "accept-new")


@dataclass(frozen=True)
class Settings:
    """What may be said about a node; None means not said.

    Attributes:
        host: an ssh name, ``local``, or ``lab``.
        python: the interpreter on the node that has sglang, when no running server tells.
        node_python: the python3 that runs surgeon's agent, when it is not on the node's PATH.
        state_dir: where surgeon keeps its state on the node.
        ssh_config: a file to read instead of the user's ssh configuration; in surgeon.toml, relative to that file.
        port: which server, when several run.
        host_key_policy: ``strict`` or ``accept-new``.
        connect_timeout_s: seconds until an unanswered connection counts as failed.
    """

    host: str | None = None
    python: str | None = None
    node_python: str | None = None
    state_dir: str | None = None
    ssh_config: str | None = None
    port: int | None = None
    host_key_policy: str | None = None
    connect_timeout_s: int | None = None

    def over(self, base: Settings) -> Settings:
        """These settings, with ``base`` filling what is not said here."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(base, **said)


def resolve(given: Settings, *, profile: str | None = None, environ: Mapping[str, str] | None = None) -> Target:
    """The target that the options, the environment and the configuration file name together.

    Raises:
        UsageError: no host is named anywhere, a profile is unknown, or a value makes no sense.
    """
    from surgeon.node.target import Target

    env = os.environ if environ is None else environ
    path = find_file(env)
    table = _load(path) if path else {}
    chosen = profile or env.get("SURGEON_PROFILE")
    said = _checked({k: v for k, v in asdict(given).items() if v is not None}, "the command line")
    settings = said.over(_from_env(env)).over(_from_table(table, chosen, path))
    if settings.host is None:
        raise UsageError(
            "no node is named: expected --host NAME, SURGEON_HOST, or a host in surgeon.toml; found none",
            advice="name a host of your ssh configuration; or `surgeon lab up`, then --host lab",
            where="--host",
        )
    if settings.host == LAB_HOST:
        from surgeon.lab import target as lab_target

        return lab_target()
    return Target(
        host=settings.host,
        ssh_config=Path(settings.ssh_config).expanduser() if settings.ssh_config else None,
        host_key_policy="accept-new" if settings.host_key_policy == "accept-new" else "strict",
        python=settings.python,
        node_python=settings.node_python,
        state_dir=settings.state_dir,
        port=settings.port,
        connect_timeout_s=float(settings.connect_timeout_s or 15),
    )


def profiles(environ: Mapping[str, str] | None = None) -> tuple[Path | None, dict[str, Settings]]:
    """The configuration file in force and every target it names; the defaults are under the empty name."""
    path = find_file(os.environ if environ is None else environ)
    if path is None:
        return None, {}
    table = _load(path)
    named = {name: _from_table(table, name, path) for name in _profiles(table, path)}
    default = _from_table(table, None, path)
    return path, ({"": default} if default.host else {}) | named


def find_file(environ: Mapping[str, str]) -> Path | None:
    """The surgeon.toml in force: SURGEON_CONFIG, the current folder and its parents, the user's folder."""
    if named := environ.get("SURGEON_CONFIG"):
        path = Path(named)
        if not path.is_file():
            raise UsageError(f"SURGEON_CONFIG names {path}, which is not a file", where="SURGEON_CONFIG")
        return path
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    import platformdirs

    path = platformdirs.user_config_path("surgeon") / FILE_NAME
    return path if path.is_file() else None


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}", where=str(path)) from error


def _from_env(environ: Mapping[str, str]) -> Settings:
    values = {
        f.name: environ[f"SURGEON_{f.name.upper()}"]
        for f in fields(Settings)
        if environ.get(f"SURGEON_{f.name.upper()}")
    }
    return _checked(values, "the environment")


def _profiles(table: Mapping[str, Any], path: Path | None) -> Mapping[str, Mapping[str, Any]]:
    known = table.get("profile", {})
    if not isinstance(known, dict) or not all(isinstance(value, dict) for value in known.values()):
        raise UsageError(f"{path}: profile is {known!r}; expected tables, each [profile.NAME]", where=str(path))
    return known


def _from_table(table: Mapping[str, Any], profile: str | None, path: Path | None) -> Settings:
    known = _profiles(table, path)
    if profile is not None and profile not in known:
        names = ", ".join(sorted(known)) or "none"
        raise UsageError(
            f"profile {profile!r} is not in {path or 'any ' + FILE_NAME}; found: {names}", where="--profile"
        )
    base = _checked({k: v for k, v in table.items() if k != "profile"}, str(path))
    said = _checked(known[profile], str(path)).over(base) if profile else base
    if path is None or said.ssh_config is None:
        return said
    return replace(said, ssh_config=str(path.parent / Path(said.ssh_config).expanduser()))


def _checked(values: Mapping[str, Any], source: str) -> Settings:
    names = {f.name for f in fields(Settings)}
    if unknown := sorted(set(values) - names):
        raise UsageError(
            f"{source}: unknown key {unknown[0]!r}; expected one of {', '.join(sorted(names))}", where=source
        )
    clean: dict[str, Any] = {key: _value(key, value, source) for key, value in values.items()}
    return Settings(**clean)


def _value(key: str, value: object, source: str) -> str | int:
    allowed = _NUMBERS.get(key)
    if allowed is not None:
        # Numbers come as text from the environment; a bool is an int to Python, and a mistake here.
        number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if isinstance(number, bool) or not isinstance(number, int) or number not in allowed:
            expected = f"a whole number, {allowed.start}..{allowed.stop - 1}"
            raise UsageError(f"{source}: {key} is {value!r}; expected {expected}", where=key)
        return number
    if not isinstance(value, str) or not value:
        raise UsageError(f"{source}: {key} is {value!r}; expected a text", where=key)
    if key == "host_key_policy" and value not in _POLICIES:
        raise UsageError(f"{source}: {key} is {value!r}; expected {' or '.join(map(repr, _POLICIES))}", where=key)
    return value
