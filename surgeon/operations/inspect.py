"""The story of ``surgeon inspect topk``: where experts are chosen, the state of the file, and whether it is reached."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.errors import DoesNotFitError, UsageError
from surgeon.operations import grafts, memory, plan, served, settle, survey

if TYPE_CHECKING:
    from surgeon.ledger.state import Verdict
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.grafts import DecodeGate
    from surgeon.operations.latest import Latest, NotKnown
    from surgeon.operations.served import ByHand, Served
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
        record_sha256: what the package's RECORD says; None if it says nothing.
        unfinished: what an earlier run left undone, in one line; empty if nothing.
        served: what is served, as the node or a person says it; None if neither does.
        by_hand: whether a person says some of it.
        latest: the newest release, if it was asked for.
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
    served: Served | None = None
    by_hand: bool = False
    latest: Latest | NotKnown | None = None
    unfinished: str = ""
    writable: bool = True
    why_not: str = ""

    @property
    def device(self) -> str | None:
        """What the model runs on, `cuda` or `cpu` and so on; None if nobody says."""
        if self.served is None:
            return None
        said = self.served.args.get("device")
        return str(said).partition(":")[0] if said else "cuda" if self.served.capability else None

    @property
    def top_k(self) -> tuple[str, int] | None:
        """The field of the served model's config that holds k, and k; None if neither is known."""
        return plan.top_k_of(self.served.config) if self.served else None


def run(
    node: Node, target: Target, patch: Patch, said: ByHand | None = None, *, check_latest: bool = False
) -> Inspection:
    """Inspect the sglang on a node, in one round trip.

    Another is needed for a model that is named and is on the node only, and another to ask for the newest release.

    Args:
        node: a connected node.
        target: which interpreter and server are meant.
        patch: whose state is told.
        said: what a person says of the model, the GPU and the server's arguments; it goes before what the node says.
        check_latest: whether to ask for the newest release, too.

    Raises:
        DoesNotFitError: there is no sglang, or several and none was chosen.
        UsageError: what was said makes no sense.
    """
    from surgeon import surgery

    seen = survey.take(node, target, patch)
    file = seen.file
    findings = plan.examine(seen, patch)
    what = served.of(seen)
    live = findings.live
    if said:
        what = said.over(what, node)
        live = what.live(seen.installed.version)
    newest = None
    if check_latest:
        from surgeon.operations import latest

        pid = seen.server.pid if seen.server and seen.installed.python_source == "server" else None
        newest = latest.check(seen.installed.version, patch, what, node, seen.installed.python, pid)
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
        live=live,
        server=seen.server,
        served=what,
        by_hand=bool(said),
        latest=newest,
        unfinished=settle.unfinished(seen),
        writable=file.writable,
        why_not=file.why_not,
    )


def offline(site: Path, patch: Patch, said: ByHand | None = None, *, check_latest: bool = False) -> Inspection:
    """Inspect an unpacked package folder: no node, no server, no ledger.

    Args:
        site: the folder that holds ``sglang/``, or ``sglang`` itself.
        patch: whose sites are looked for.
        said: the model, GPU and server arguments to judge the live path for; None or empty not to judge it.
        check_latest: whether to try the patch on the newest release that this machine's index has, too.

    Raises:
        UsageError: the folder is not there, or no sglang is in it; or what was said makes no sense.
    """
    from surgeon import surgery
    from surgeon.node.agent.packages import recorded_sha256

    package, version = find_package(site)
    path = package / TOPK
    source = path.read_bytes()
    other = package / RUNNER
    runner_source = other.read_bytes() if other.is_file() else None
    runner, gate = grafts.look_at_runner(runner_source, patch)
    info = dist_info(package)
    what = said.over(None) if said else None
    newest = None
    if check_latest:
        from surgeon.operations import latest

        newest = latest.check(version, patch, what)
    return Inspection(
        version=version,
        path=str(path),
        sha256=hashlib.sha256(source).hexdigest(),
        lines=_count_lines(source),
        nlink=path.stat().st_nlink,
        python="",
        record_sha256=recorded_sha256(str(info), str(path)) if info else None,
        located=memory.locate(source),
        functions=surgery.functions(source),
        source=source,
        gate=gate,
        runner_path=str(other) if runner_source is not None else "",
        runner=runner,
        runner_source=runner_source or b"",
        live=what.live(version) if what else None,
        served=what,
        by_hand=bool(said),
        latest=newest,
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
    info = dist_info(package)
    version = info.name.removeprefix("sglang-").removesuffix(".dist-info") if info else "unknown"
    return package, version


def dist_info(package: Path) -> Path | None:
    """The metadata folder that lies beside a package folder, if one does."""
    return next(iter(sorted(package.parent.glob("sglang-*.dist-info"))), None)


def _count_lines(source: bytes) -> int:
    return len(source.splitlines())
