"""The story of ``surgeon inspect topk``: where experts are chosen, the state of the file, and whether it is reached."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.errors import DoesNotFitError, UsageError
from surgeon.operations import grafts, plan, settle, survey

if TYPE_CHECKING:
    from surgeon.ledger.state import Verdict
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.grafts import DecodeGate
    from surgeon.patches import Patch
    from surgeon.server.model import Server
    from surgeon.surgery import Function
    from surgeon.surgery import Outcome as Located
    from surgeon.surgery.live_path import Verdict as LivePath

TOPK = Path("srt/layers/moe/topk.py")
RUNNER = Path("srt/model_executor/model_runner.py")


@dataclass(frozen=True)
class Inspection:
    """What an inspect found.

    Attributes:
        lines: how many lines the file has.
        unfinished: what an earlier run left undone, in one line; empty if nothing.
        top_k: k and where it was read, if a model is served.
        gate: how the patch would tell decode from prefill here.
        runner_path: model_runner.py, where it does; empty if this sglang has none.
        runner: what the locator found in it; None if there is none, or the patch has no use for it.
        runner_source: its bytes.
    """

    version: str
    path: str
    sha256: str
    lines: int
    nlink: int
    python: str
    record_sha256: str | None
    located: Located
    functions: tuple[Function, ...]
    source: bytes = field(repr=False)
    gate: DecodeGate
    runner_path: str = ""
    runner: Located | None = None
    runner_source: bytes = field(default=b"", repr=False)
    state: Verdict | None = None
    live: LivePath | None = None
    server: Server | None = None
    architecture: str | None = None
    model: str | None = None
    top_k: tuple[str, int] | None = None
    unfinished: str = ""
    writable: bool = True
    why_not: str = ""


def run(node: Node, target: Target, patch: Patch) -> Inspection:
    """Inspect the sglang on a node, in one round trip.

    Raises:
        DoesNotFitError: there is no sglang, or several and none was chosen.
    """
    from surgeon import surgery

    seen = survey.take(node, target, patch)
    file = seen.file
    findings = plan.examine(seen, patch)
    return Inspection(
        version=seen.installed.version,
        path=file.path,
        sha256=file.sha256,
        lines=_count_lines(file.source),
        nlink=file.nlink,
        python=seen.installed.python,
        record_sha256=file.record_sha256,
        located=findings.located,
        functions=surgery.functions(file.source),
        source=file.source,
        gate=findings.gate,
        runner_path=seen.runner.path if seen.runner else "",
        runner=findings.runner,
        runner_source=seen.runner.source if seen.runner else b"",
        state=findings.state,
        live=findings.live,
        server=seen.server,
        architecture=seen.architecture,
        model=(seen.model or {}).get("path"),
        top_k=plan.top_k(seen),
        unfinished=settle.unfinished(seen),
        writable=file.writable,
        why_not=file.why_not,
    )


def offline(site: Path, patch: Patch) -> Inspection:
    """Inspect an unpacked package folder: no node, no server, no ledger.

    Args:
        site: the folder that holds ``sglang/``, or ``sglang`` itself.
        patch: whose sites are looked for.

    Raises:
        UsageError: the folder is not there, or no sglang is in it.
    """
    from surgeon import surgery

    package, version = find_package(site)
    path = package / TOPK
    source = path.read_bytes()
    other = package / RUNNER
    runner_source = other.read_bytes() if other.is_file() else None
    runner, gate = grafts.look_at_runner(runner_source, patch)
    return Inspection(
        version=version,
        path=str(path),
        sha256=hashlib.sha256(source).hexdigest(),
        lines=_count_lines(source),
        nlink=path.stat().st_nlink,
        python="",
        record_sha256=None,
        located=surgery.locate(source),
        functions=surgery.functions(source),
        source=source,
        gate=gate,
        runner_path=str(other) if runner_source is not None else "",
        runner=runner,
        runner_source=runner_source or b"",
    )


def find_package(site: Path) -> tuple[Path, str]:
    """The sglang folder in ``site`` and its version.

    Raises:
        UsageError: the folder is not there, or no sglang is in it.
        DoesNotFitError: that sglang has no topk.py.
    """
    package = site if (site / TOPK).is_file() else site / "sglang"
    if not package.is_dir():
        raise UsageError(
            f"no sglang in {site}: expected the folder that holds sglang/, or sglang itself",
            advice="unpack a wheel with `python -m zipfile -e sglang-*.whl DIR`, then --site DIR",
            where="--site",
        )
    if not (package / TOPK).is_file():
        raise DoesNotFitError(
            f"{package} has no {TOPK}; expected it in every release from 0.4.3 on", where=str(package)
        )
    names = sorted(package.parent.glob("sglang-*.dist-info"))
    version = names[0].name.removeprefix("sglang-").removesuffix(".dist-info") if names else "unknown"
    return package, version


def _count_lines(source: bytes) -> int:
    return len(source.splitlines())
