"""One look at a node: what an operation knows before it judges. One round trip."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from surgeon.environment.baseline import Baseline, parse_baseline
from surgeon.environment.snapshot import Snapshot, parse_distributions
from surgeon.errors import DoesNotFitError, UsageError
from surgeon.ledger.records import Ledger, parse_ledger
from surgeon.server.model import Server, parse_server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.patches import Patch


@dataclass(frozen=True)
class Package:
    """The installed sglang.

    Attributes:
        dir: its folder.
        version: by its dist-info.
        site_packages: the folder that holds it.
        site_id: short name of that folder, under which the node's ledger is kept.
        requires: its Requires-Dist lines.
        python: the interpreter that imports it.
        python_source: ``server``, ``option`` or ``path``: how that interpreter was found.
        python_version: its version.
    """

    dir: str
    version: str
    site_packages: str
    site_id: str
    requires: tuple[str, ...]
    python: str
    python_source: str
    python_version: str


@dataclass(frozen=True)
class TargetFile:
    """The file to be cut, as it lies on the node."""

    path: str
    source: bytes = field(repr=False)
    sha256: str
    mode: int
    nlink: int
    record_sha256: str | None
    writable: bool
    why_not: str = ""


@dataclass(frozen=True)
class Survey:
    """All that one look at a node told.

    Attributes:
        server: the one that is meant; None when none runs, or nothing says which.
        runner: model_runner.py, which tells decode from prefill; None if this sglang has none.
        present: sha256 of every file that the ledger ever wrote, by path; None for one that is not there.
        wanted_port: the port of the one that was asked for.
        wanted_python: the interpreter that was asked for.
    """

    node: Mapping[str, Any]
    state_dir: str
    servers: tuple[Server, ...]
    server: Server | None
    installations: tuple[Mapping[str, Any], ...]
    package: Package | None
    topk: TargetFile | None
    beside: Mapping[str, Mapping[str, Any] | None]
    distributions: tuple[Mapping[str, Any], ...] = field(repr=False)
    gpus: tuple[Mapping[str, Any], ...]
    model: Mapping[str, Any] | None
    server_info: Mapping[str, Any] | None
    ledger: Ledger
    beacons: tuple[Mapping[str, Any], ...]
    launch: Mapping[str, Any] | None
    documents: Mapping[str, Any]
    problems: tuple[Mapping[str, Any], ...]
    runner: TargetFile | None = None
    present: Mapping[str, str | None] = field(default_factory=dict)
    wanted_port: int | None = None
    wanted_python: str | None = None

    @property
    def baseline(self) -> Baseline | None:
        """The saved baseline of this environment."""
        return parse_baseline(self.documents.get("baseline"))

    @property
    def snapshot(self) -> Snapshot:
        """The environment, for the rules that judge it."""
        package = self.installed
        return Snapshot(
            python=package.python,
            python_version=package.python_version,
            package="sglang",
            package_version=package.version,
            requires=package.requires,
            distributions=parse_distributions(self.distributions),
            machine=str(self.node.get("machine") or "x86_64"),
        )

    @property
    def installed(self) -> Package:
        """The installed sglang.

        Raises:
            DoesNotFitError: there is none, or there are several and nothing says which.
            UsageError: several servers run and none was chosen, or none of them has the port that was.
        """
        if self.package is not None:
            return self.package
        if self.wanted_python is not None and not self.installations:
            raise self._without(self.wanted_python)
        ports = ", ".join(str(s.port) for s in self.servers)
        if self.servers and self.wanted_port is not None:
            raise UsageError(
                f"no sglang server is running for port {self.wanted_port}; expected one of the ports that are: {ports}",
                advice="say one of them with --port, or which interpreter has sglang with --python PATH",
                where="--port",
            )
        if len(self.servers) > 1:
            raise UsageError(
                f"{len(self.servers)} sglang servers are running (ports {ports}); expected one, or a choice",
                advice="say which with --port",
                where="--port",
            )
        if len(self.installations) > 1:
            listed = "; ".join(f"{i['version']} at {i['package_dir']} ({i['python']})" for i in self.installations)
            raise DoesNotFitError(
                f"{len(self.installations)} sglang installations were found and no running server tells which one "
                f"counts: {listed}",
                advice="say which with --python PATH",
                where="--python",
                code="several-installations",
            )
        if self.installations:
            only = self.installations[0]
            raise DoesNotFitError(
                f"sglang {only.get('version')} is at {only.get('package_dir')}, but its {_TOPK} cannot be read",
                where=str(only.get("package_dir", "")),
            )
        raise DoesNotFitError(
            "no sglang was found: no server is running, and no interpreter that was looked at has it",
            advice="say which interpreter has it with --python PATH (for example /opt/venv/bin/python)",
            where="--python",
            code="no-sglang",
        )

    def _without(self, python: str) -> DoesNotFitError:
        odd = next((str(p["message"]) for p in self.problems if p.get("code") == "interpreter"), "")
        return DoesNotFitError(
            odd or f"{python} has no sglang; expected an interpreter that imports it",
            advice="name another with --python PATH, or leave it to the running server to tell",
            where="--python",
            code="no-sglang",
        )

    @property
    def file(self) -> TargetFile:
        """The topk.py to be cut.

        Raises:
            DoesNotFitError: this sglang has none.
        """
        package = self.installed
        if self.topk is None:
            raise DoesNotFitError(
                f"sglang {package.version} at {package.dir} has no {_TOPK}; expected it in every release from 0.4.3 on",
                where=package.dir,
            )
        return self.topk

    @property
    def architecture(self) -> str | None:
        """The served model's first architecture."""
        config = (self.model or {}).get("config") or {}
        names = config.get("architectures") or []
        return str(names[0]) if names else None

    @property
    def model_config(self) -> Mapping[str, Any]:
        """The served model's config.json, its text part if it has one; empty if it could not be read."""
        config: Mapping[str, Any] = (self.model or {}).get("config") or {}
        inner = config.get("text_config")
        return {**config, **inner} if isinstance(inner, dict) else config

    @property
    def hashes(self) -> dict[str, str | None]:
        """The sha256 of every file that a patch may touch or has touched, by path; None for one that is not there."""
        cut = {file.path: file.sha256 for file in (self.file, self.runner) if file is not None}
        beside = {str(entry["path"]): entry.get("sha256") for entry in self.beside.values() if entry}
        return {**self.present, **cut, **beside}

    def beside_path(self, name: str) -> str:
        """Path of a file beside topk.py."""
        return str(PurePosixPath(self.file.path).parent / name)


_TOPK = "srt/layers/moe/topk.py"


def take(node: Node, target: Target, patch: Patch | None = None, *, http: bool = True) -> Survey:
    """Look at the node once.

    Args:
        node: a connected node.
        target: which interpreter and server were asked for.
        patch: whose modules are looked for beside topk.py.
        http: whether to ask the running server for its resolved arguments (up to 2 s if it does not answer).
    """
    asked: dict[str, Any] = {"python": target.python, "port": target.port, "pid": target.pid, "http": http}
    if patch is not None:
        asked |= {"module": patch.module, "parts": [part.name for part in patch.parts]}
    raw = node.call("survey", asked, deadline_s=60.0)
    return replace(parse(raw), wanted_port=target.port, wanted_python=target.python)


def parse(raw: Mapping[str, Any]) -> Survey:
    """A survey from the agent's answer."""
    servers = tuple(parse_server(s) for s in raw.get("servers") or ())
    chosen = raw.get("chosen")
    return Survey(
        node=raw.get("node") or {},
        state_dir=str(raw.get("state_dir") or ""),
        servers=servers,
        server=next((s for s in servers if s.pid == chosen), None),
        installations=tuple(raw.get("installations") or ()),
        package=_package(raw),
        topk=_file(raw.get("topk")),
        runner=_file(raw.get("runner")),
        present=raw.get("present") or {},
        beside=raw.get("beside") or {},
        distributions=tuple(raw.get("packages") or ()),
        gpus=tuple(raw.get("gpus") or ()),
        model=raw.get("model"),
        server_info=raw.get("server_info"),
        ledger=parse_ledger(raw.get("ledger") or {}),
        beacons=tuple(raw.get("beacons") or ()),
        launch=raw.get("launch"),
        documents=raw.get("documents") or {},
        problems=tuple(raw.get("problems") or ()),
    )


def _package(raw: Mapping[str, Any]) -> Package | None:
    package = raw.get("package")
    interpreter = raw.get("interpreter")
    if not package or not interpreter:
        return None
    return Package(
        dir=str(package["dir"]),
        version=str(package.get("version") or "unknown"),
        site_packages=str(package["site_packages"]),
        site_id=str(package["site_id"]),
        requires=tuple(package.get("requires") or ()),
        python=str(interpreter["path"]),
        python_source=str(interpreter.get("source", "")),
        python_version=str(interpreter.get("version", "")),
    )


def _file(raw: Mapping[str, Any] | None) -> TargetFile | None:
    if not raw:
        return None
    return TargetFile(
        path=str(raw["path"]),
        source=base64.b64decode(raw["b64"]),
        sha256=str(raw["sha256"]),
        mode=int(raw["mode"]),
        nlink=int(raw["nlink"]),
        record_sha256=raw.get("record_sha256"),
        writable=bool(raw.get("writable")),
        why_not=str(raw.get("why_not") or ""),
    )
