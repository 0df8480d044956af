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
    from collections.abc import Mapping

_UNSET: Final = b'PATCH_HASH = "unset"'
SETTINGS_SCHEMA: Final = "surgeon/{name}-settings/1"


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
        specs: for each setting its ``type`` and ``min``, ``max`` or ``choices``.
        runtime: the module's bytes, the hash filled in.
        hash: sha256 (hex) over the runtime and all that shapes the graft; beacons report it.
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
            option = f"--{name.replace('_', '-')}"
            match spec["type"]:
                case "choice" if value not in spec["choices"]:
                    raise UsageError(f"{name} is {value!r}; expected {' or '.join(spec['choices'])}", where=option)
                case "int" if type(value) is not int or not spec["min"] <= value <= spec["max"]:
                    raise UsageError(f"{name} is {value!r}; expected {spec['min']}..{spec['max']}", where=option)
                case "bool" if type(value) is not bool:
                    raise UsageError(f"{name} is {value!r}; expected true or false", where=option)
        asked = {**self.settings, **{name: value for name, value in values.items() if value is not None}}
        for low in [name for name in asked if name.startswith("min_")]:
            high = f"max_{low.removeprefix('min_')}"
            if high in asked and asked[low] > asked[high]:
                option = f"--{low.replace('_', '-')}"
                raise UsageError(f"{low} is {asked[low]}; expected at most {high}, {asked[high]}", where=option)

    def say(self, settings: Mapping[str, Any]) -> str:
        """Settings in one line, for people; switches that stand at their default are left out."""
        shown = {k: v for k, v in settings.items() if not (isinstance(v, bool) and v == self.settings.get(k))}
        return ", ".join(f"{key} = {value}" for key, value in shown.items())

    def settings_file(self, settings: Mapping[str, Any], *, generation: int, beacon_dir: str) -> bytes:
        """The bytes of the settings file that lies beside the runtime."""
        body = {
            "schema": SETTINGS_SCHEMA.format(name=self.name),
            "generation": generation,
            **self.settings,
            **settings,
            "beacon_dir": beacon_dir,
        }
        return (json.dumps(body, indent=2) + "\n").encode()


def data_dir(kind: str) -> Path:
    """The folder of patches or recipes: in the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parent
    shipped = package / "_data" / kind
    return shipped if shipped.is_dir() else package.parent / kind


def load(name: str) -> Patch:
    """The patch of that name.

    Raises:
        UsageError: there is no such patch.
    """
    folder = data_dir("patches") / name
    known = sorted(p.parent.name for p in data_dir("patches").glob("*/patch.toml"))
    if name not in known:
        raise UsageError(f"there is no patch {name!r}; expected one of {', '.join(known)}", where="PATCH")
    raw = (folder / "patch.toml").read_bytes()
    about = tomllib.loads(raw.decode())
    runtime = (folder / "runtime.py").read_bytes()
    if runtime.count(_UNSET) != 1:
        raise UsageError(f"{folder / 'runtime.py'} does not hold {_UNSET.decode()} exactly once")
    digest = hashlib.sha256(raw + b"\0" + runtime).hexdigest()
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
    )
