"""The story of ``surgeon verify-env``: what drifted, whether the model's config still builds, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from surgeon.environment.baseline import Baseline, take
from surgeon.environment.checks import Check, Severity
from surgeon.operations import environment, lease, settle, survey

if TYPE_CHECKING:
    from collections.abc import Callable

    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.observer import Observer

_REPAIR_S: Final = 1800.0


@dataclass(frozen=True)
class Outcome:
    """What verify-env found.

    Attributes:
        repair: the command that would mend what can be mended by installing; empty if nothing can.
        repaired: whether it was run and the checks were made again.
        saved: the baseline that was recorded now, if one was.
    """

    python: str
    version: str
    checks: tuple[Check, ...]
    baseline: Baseline | None
    repair: tuple[str, ...] = ()
    repaired: bool = False
    saved: Baseline | None = None
    unfinished: str = ""

    @property
    def drifted(self) -> bool:
        """Whether anything would make a restart fail."""
        return any(c.severity is Severity.FAIL for c in self.checks)


def run(
    node: Node,
    target: Target,
    observer: Observer,
    *,
    save: bool = False,
    reason: str = "",
    fix: Callable[[tuple[str, ...]], bool] | None = None,
) -> Outcome:
    """Check the environment; optionally record it as the baseline, or repair it.

    Args:
        node: where.
        target: which interpreter and server were asked for.
        observer: is told.
        save: record what is installed as the baseline.
        reason: why pins that are not met are meant so, for the record.
        fix: shown the repair's command; True runs it.
    """
    seen = survey.take(node, target)
    checks = environment.check(node, seen, observer)
    command = repair_command(seen, checks)
    repaired = False
    if fix is not None and command and fix(command):
        with lease.held(node, seen, observer):
            _repair(node, seen, command, observer)
        seen = survey.take(node, target)
        checks = environment.check(node, seen, observer)
        repaired = True
    saved = _save(node, seen, checks, reason) if save else None
    return Outcome(
        python=seen.installed.python,
        version=seen.installed.version,
        checks=tuple(checks),
        baseline=seen.baseline,
        repair=command,
        repaired=repaired,
        saved=saved,
        unfinished=settle.unfinished(seen),
    )


def repair_command(seen: survey.Survey, checks: list[Check]) -> tuple[str, ...]:
    """The smallest install that undoes the drift, without dependencies: those would move other packages again."""
    wanted = [requirement for check in checks if check.severity is Severity.FAIL for requirement in check.repair]
    if not wanted:
        return ()
    by_uv = any(d.get("name") == "sglang" and d.get("installer") == "uv" for d in seen.distributions)
    python = seen.installed.python
    tool = ("uv", "pip", "install", "--python", python) if by_uv else (python, "-m", "pip", "install")
    return (*tool, "--no-deps", *wanted)


def _repair(node: Node, seen: survey.Survey, command: tuple[str, ...], observer: Observer) -> None:
    from surgeon.errors import DriftError

    lease.renew(node, seen.installed.site_id, busy_s=_REPAIR_S)
    with observer.step(f"Running {' '.join(command)}") as step:
        answer = node.call(
            "run",
            {
                "argv": list(command),
                "pid": seen.server.pid if seen.server else None,
                "python": seen.installed.python,
                "timeout_s": _REPAIR_S,
            },
            deadline_s=_REPAIR_S + 10.0,
        )
        if int(answer["returncode"]) != 0:
            last = (answer["stderr"].strip() or answer["stdout"].strip()).splitlines()[-1:]
            raise DriftError(
                f"the repair failed with {answer['returncode']}: {' '.join(last)}",
                advice="the running server was not touched; run the command by hand to see all it says",
                where=" ".join(command),
            )
        step.done("done")


def _save(node: Node, seen: survey.Survey, checks: list[Check], reason: str) -> Baseline:
    now = float(seen.node.get("time") or 0.0)
    baseline = take(seen.snapshot, checks, saved=now, who="@".join(lease.whoami()), reason=reason)
    node.call("document", {"site_id": seen.installed.site_id, "name": "baseline", "value": baseline.to_json()})
    return baseline
