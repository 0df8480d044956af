"""The environment of the server: its checks, and the refusal to restart into one that cannot start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surgeon.environment.baseline import check_drift
from surgeon.environment.checks import Check, Severity
from surgeon.environment.pins import check_pins
from surgeon.environment.probe import CODE, judge_probe, read_probe
from surgeon.errors import DriftError

if TYPE_CHECKING:
    from surgeon.node.client import Node
    from surgeon.operations.observer import Observer
    from surgeon.operations.survey import Survey


def check(node: Node, seen: Survey, observer: Observer) -> list[Check]:
    """All checks of this environment: the model's config, drift from the baseline, pins."""
    snapshot = seen.snapshot
    return [
        probe_model(node, seen, observer),
        *check_drift(snapshot, seen.baseline),
        *check_pins(snapshot, seen.baseline),
    ]


def probe_model(node: Node, seen: Survey, observer: Observer) -> Check:
    """Build the served model's config object under the server's own interpreter, environment and working directory."""
    path = (seen.model or {}).get("path") or (seen.server.model_path if seen.server else None)
    if not path:
        return Check("model-config", Severity.INFO, "no model is served, so whether its config builds was not checked")
    with observer.step("Building the model's config under the server's interpreter") as step:
        trust = "1" if seen.server and "--trust-remote-code" in seen.server.argv else "0"
        answer = node.call(
            "run",
            {
                "code": CODE,
                "argv": [str(path), trust],
                "pid": seen.server.pid if seen.server else None,
                "python": seen.installed.python,
                "timeout_s": 180.0,
            },
            deadline_s=190.0,
        )
        said = read_probe(answer["stdout"], answer["stderr"], int(answer["returncode"]))
        verdict = judge_probe(said, model=str(path), model_type=str(seen.model_config.get("model_type", "")))
        (step.failed if verdict.severity is Severity.FAIL else step.done)(verdict.title)
    return verdict


def refuse_drift(node: Node, seen: Survey, observer: Observer) -> None:
    """Raise if a restart would fail for what is installed now.

    Raises:
        DriftError: naming the first failure and all others.
    """
    failures = [
        c
        for c in (*check_drift(seen.snapshot, seen.baseline), probe_model(node, seen, observer))
        if c.severity is Severity.FAIL
    ]
    if failures:
        first = failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise DriftError(
            f"the environment has drifted; a restart would fail: {first.title}{more}",
            advice=first.advice or "see `surgeon verify-env`; nothing was touched, the running server keeps running",
            where=first.id,
        )
