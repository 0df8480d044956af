"""The story of ``surgeon bench smoke``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.bench.smoke import Load, SmokeResult, last_unpatched
from surgeon.operations import plan, restart, survey
from surgeon.operations import smoke as runner

if TYPE_CHECKING:
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.observer import Observer
    from surgeon.patches import Patch


@dataclass(frozen=True)
class Outcome:
    """This run, and the last one of the unpatched server under the same load."""

    result: SmokeResult
    before: SmokeResult | None


def smoke(node: Node, target: Target, patch: Patch, observer: Observer, load: Load) -> Outcome:
    """Run the smoke benchmark against the running server and keep the result on the node.

    Raises:
        DoesNotFitError: no server is running.
    """
    seen = survey.take(node, target, patch, http=False)
    if seen.server is None:
        raise restart.no_server(seen, target)
    state = plan.examine(seen, patch).state.state
    settings = (seen.beside.get("settings") or {}).get("text") or ""
    patched = f"{patch.name}: {state.value} {' '.join(settings.split())}" if state.on_disk else ""
    results = seen.documents.get("smoke")
    before = last_unpatched(results if isinstance(results, list) else [], load, seen.installed.version)
    result = runner.run(node, seen, seen.server, observer, patched=patched, load=load)
    return Outcome(result, before if patched else None)
