"""The patches that surgeon ships: read from patches/NAME/, sent to a node, never imported here.

In the repository they lie at its top; in an installed wheel inside the package, under ``_data``.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNSET: Final = b'PATCH_HASH = "unset"'
SETTINGS_SCHEMA: Final = "surgeon/{name}-settings/1"
_MOST_ROWS: Final = 4096  # what one range of a schedule may reach to, as max_rows


@dataclass(frozen=True)
class Module:
    """One module that is put beside topk.py: its name, without ``.py``, and its bytes."""

    name: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Patch:
    """One patch, ready to ship.

    Attributes:
        name: what people type, for example ``oea``.
        version: the patch's own version.
        summary: one line.
        module: the runtime's module name beside topk.py.
        package: the dotted package that the module lies in.
        wants: names of select_experts that the runtime would like to be passed.
        settings: the default of each setting.
        specs: for each setting its ``type``, ``help``, and ``min``, ``max`` or ``choices``.
        runtime: the module's bytes, the hash filled in.
        hash: sha256 (hex) over every module and all that shapes the grafts; beacons report it.
        announce: the runtime's function that is told of each forward pass; empty if the patch has none.
        announce_flag: the attribute of the runtime that must be true for that call to happen.
        parts: the modules that the runtime imports, in the order of patch.toml.
    """

    name: str
    version: str
    summary: str
    module: str
    package: str
    wants: tuple[str, ...]
    settings: Mapping[str, Any]
    specs: Mapping[str, Mapping[str, Any]] = field(repr=False)
    runtime: bytes = field(repr=False)
    hash: str
    announce: str = ""
    announce_flag: str = "active"
    parts: tuple[Module, ...] = ()

    @property
    def shipped(self) -> tuple[Module, ...]:
        """Every module that goes beside topk.py, each after what it imports."""
        return (*self.parts, Module(self.module, self.runtime))

    @property
    def stamp(self) -> str:
        """The short form of the hash that the graft's marker carries."""
        return self.hash[:12]

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse values that no model could make sense of; None stands for not said.

        Raises:
            UsageError: an unknown setting, a value outside what patch.toml says, or, with the defaults for what is not
                said, a ``min_`` above its ``max_``.
        """
        for name, value in values.items():
            spec = self.specs.get(name)
            if spec is None:
                raise UsageError(f"{self.name} has no setting {name!r}; expected one of {', '.join(self.specs)}")
            if value is None:
                continue
            _check(name, spec, value)
        asked = {**self.settings, **{name: value for name, value in values.items() if value is not None}}
        for low in [name for name in asked if name.startswith("min_")]:
            high = f"max_{low.removeprefix('min_')}"
            if high in asked and asked[low] > asked[high]:
                raise UsageError(f"{low} is {asked[low]}; expected at most {high}, {asked[high]}", where=option_of(low))

    def complete(self, chosen: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """All settings: what was chosen, over ``base`` (the defaults), None standing for not chosen.

        A k0 that was chosen without a schedule holds for every batch, so it takes a schedule away.
        """
        said = {name: value for name, value in chosen.items() if value is not None}
        if "k0" in said:
            for name, spec in self.specs.items():
                if spec["type"] == "schedule" and name not in said:
                    said[name] = spec["default"]
        known = {name: value for name, value in (base or {}).items() if name in self.settings}
        return {**self.settings, **known, **said}

    def k0s(self, settings: Mapping[str, Any]) -> list[tuple[int, str]]:
        """Every k0 that these settings name, with the option that says it: the one number, or those of a schedule."""
        for name, spec in self.specs.items():
            if spec["type"] == "schedule" and settings.get(name):
                return [(int(k0), option_of(name)) for _, _, k0 in settings[name]]
        return [(int(settings["k0"]), option_of("k0"))]

    def say(self, settings: Mapping[str, Any]) -> str:
        """Settings in one line, for people: how many experts are kept, and whatever else is not at its default."""
        schedules = [name for name, spec in self.specs.items() if spec["type"] == "schedule" and settings.get(name)]
        shown = []
        for name, value in settings.items():
            if name not in self.specs or (name == "k0" and schedules):
                continue
            if name == "k0" or value != self.settings.get(name):
                text = say_schedule(value) if self.specs[name]["type"] == "schedule" else value
                shown.append(f"{name} = {text}")
        return ", ".join(shown)

    def settings_file(
        self, settings: Mapping[str, Any], *, generation: int, beacon_dir: str, at_pass: int | None = None
    ) -> bytes:
        """The bytes of the settings file that lies beside the runtime.

        Args:
            settings: what is wanted; defaults fill in the rest.
            generation: greater than any that a process may have seen.
            beacon_dir: where the runtime writes its beacons.
            at_pass: the forward pass from which on a process that runs already obeys; None: only those that start.
        """
        body = {
            "schema": SETTINGS_SCHEMA.format(name=self.name),
            "generation": generation,
            **self.settings,
            **settings,
            "beacon_dir": beacon_dir,
        }
        if at_pass is not None:
            body["at_pass"] = at_pass
        return (json.dumps(body, indent=2) + "\n").encode()


def option_of(setting: str) -> str:
    """The command line's option for a setting."""
    return f"--{setting.removeprefix('k0_').replace('_', '-')}"


def read_schedule(text: str, *, where: str = "--schedule") -> list[list[int]]:
    """A schedule from ``LOW-HIGH:K0,LOW-HIGH:K0,...``, where a range may be one number of rows.

    Raises:
        UsageError: it is not written so.
    """
    ranges: list[list[int]] = []
    for part in text.split(","):
        rows, colon, k0 = part.strip().partition(":")
        low, _, high = rows.partition("-")
        words = (low, high or low, k0)
        if not colon or not all(word.strip().isdigit() for word in words):
            raise UsageError(
                f"{part.strip()!r} is no part of a schedule; expected rows and k0, such as 3-4:6",
                advice="for example: 1-2:8,3-4:6,5-8:5,9-64:4",
                where=where,
            )
        ranges.append([int(word) for word in words])
    return ranges


def say_schedule(ranges: Sequence[Sequence[int]]) -> str:
    """A schedule as it is typed."""
    return ",".join(f"{low}-{high}:{k0}" if low != high else f"{low}:{k0}" for low, high, k0 in ranges)


def _check(name: str, spec: Mapping[str, Any], value: Any) -> None:
    """Refuse a value of the wrong kind or outside its range."""
    expected = ""
    match spec["type"]:
        case "choice" if value not in spec["choices"]:
            expected = " or ".join(spec["choices"])
        case "int" if type(value) is not int or not spec["min"] <= value <= spec["max"]:
            expected = f"{spec['min']}..{spec['max']}"
        case "float" if type(value) not in {int, float} or not spec["min"] <= value <= spec["max"]:
            expected = f"{spec['min']}..{spec['max']}"
        case "bool" if type(value) is not bool:
            expected = "true or false"
        case "schedule":
            _check_schedule(name, value, where=option_of(name))
    if expected:
        raise UsageError(f"{name} is {value!r}; expected {expected}", where=option_of(name))


def _check_schedule(name: str, value: Any, *, where: str) -> None:
    """Refuse ranges that overlap, go backwards or leave what a pass can have."""
    written = isinstance(value, list) and all(
        isinstance(part, list) and len(part) == len(("low", "high", "k0")) and all(type(n) is int for n in part)
        for part in value
    )
    if not written:
        raise UsageError(f"{name} is {value!r}; expected a list of [low, high, k0]", where=where)
    before = 0
    for low, high, k0 in value:
        if not before < low <= high <= _MOST_ROWS or k0 < 1:
            raise UsageError(
                f"{name} has {low}-{high}:{k0}; expected ranges of 1..{_MOST_ROWS} rows in rising order without "
                "overlap, each with a k0 of at least 1",
                where=where,
            )
        before = high


def data_dir(kind: str) -> Path:
    """The folder of patches or recipes: in the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parent
    shipped = package / "_data" / kind
    return shipped if shipped.is_dir() else package.parent / kind


def describe(name: str) -> Mapping[str, Any]:
    """What patch.toml says, for those who need no code.

    Raises:
        UsageError: there is no such patch.
    """
    return _read(name)[2]


def _read(name: str) -> tuple[Path, bytes, dict[str, Any]]:
    folder = data_dir("patches") / name
    known = sorted(p.parent.name for p in data_dir("patches").glob("*/patch.toml"))
    if name not in known:
        raise UsageError(f"there is no patch {name!r}; expected one of {', '.join(known)}", where="PATCH")
    raw = (folder / "patch.toml").read_bytes()
    return folder, raw, tomllib.loads(raw.decode())


def load(name: str) -> Patch:
    """The patch of that name.

    Raises:
        UsageError: there is no such patch, or its runtime has no one place for its hash.
    """
    folder, raw, about = _read(name)
    runtime = (folder / "runtime.py").read_bytes()
    if runtime.count(_UNSET) != 1:
        raise UsageError(f"{folder / 'runtime.py'} does not hold {_UNSET.decode()} exactly once")
    parts = tuple(Module(module, (folder / file).read_bytes()) for module, file in about.get("modules", {}).items())
    digest = hashlib.sha256(b"\0".join((raw, runtime, *(part.content for part in parts)))).hexdigest()
    target = about["target"]
    return Patch(
        name=about["name"],
        version=about["version"],
        summary=about["summary"],
        module=target["module"],
        package=target["package"],
        wants=tuple(target["wants"]),
        settings={key: spec["default"] for key, spec in about["settings"].items() if "default" in spec},
        specs=about["settings"],
        runtime=runtime.replace(_UNSET, f'PATCH_HASH = "{digest}"'.encode()),
        hash=digest,
        announce=about.get("announce", {}).get("function", ""),
        announce_flag=about.get("announce", {}).get("flag", target["flag"]),
        parts=parts,
    )
