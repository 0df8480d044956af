"""The story of ``surgeon set``: settings of a running server change between two requests, in every rank at one pass.

Survey, judge, plan, confirm; wait until nothing runs; write the settings with the pass from which on they hold; wait
until every rank has armed them; carry the server over that pass with a short generation; demand that every rank has
them in force from the same pass. Whatever fails, the settings from before come back into force, and the ledger says
both. The server is never restarted, and its traffic never held back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from surgeon.errors import DoesNotFitError, ForeignEditError
from surgeon.ledger.state import PatchState
from surgeon.operations import lease, plan, proof, restart, settle, survey, switching, switching_back
from surgeon.server import beacons

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from surgeon.ledger.records import Gate
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.observer import Observer
    from surgeon.operations.settle import Settled
    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch
    from surgeon.server.model import Server

WAIT_S: Final = 30.0


@dataclass(frozen=True)
class Options:
    """How to change settings.

    Attributes:
        dry_run: plan and stop.
        break_lock: take the lease from whoever holds it.
        wait_s: seconds that running requests may take to end.
    """

    dry_run: bool = False
    break_lock: bool = False
    wait_s: float = WAIT_S


@dataclass(frozen=True)
class SetPlan:
    """What would be changed.

    Attributes:
        server: whose settings they are.
        path: the settings file on the node.
        present: sha256 of that file now.
        before: the settings in force in every rank.
        settings: those that are wanted.
        generation: the number that the wanted ones get.
        unchanged: why nothing needs to be done; empty if something does.
        warnings: what a person should know before saying yes.
    """

    patch: Patch = field(repr=False)
    server: Server
    path: str
    version: str
    present: str | None
    before: Mapping[str, Any]
    settings: Mapping[str, Any]
    generation: int
    unchanged: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a change came to.

    Attributes:
        status: ``planned`` (dry run), ``declined``, ``unchanged`` or ``set``.
        revision: the new revision, if one was made.
        from_pass: the forward pass from which on every rank obeys.
        gates: what every rank had to show.
    """

    status: Literal["planned", "declined", "unchanged", "set"]
    plan: SetPlan
    revision: int | None = None
    from_pass: int | None = None
    gates: tuple[Gate, ...] = ()
    settled: Settled | None = None


def run(
    node: Node,
    target: Target,
    patch: Patch,
    wanted: Mapping[str, Any],
    options: Options,
    observer: Observer,
    confirm: Callable[[SetPlan], bool],
) -> Outcome:
    """Change settings of the running server.

    Raises:
        SurgeonError: its subclass says what was refused or failed; after GateFailedError the settings from before are
            in force in every rank.
    """
    seen = survey.take(node, target, patch, http=False)
    agreed: SetPlan | None = None
    if not _unfinished_set(seen):
        agreed = make_plan(seen, target, patch, wanted)
        if options.dry_run:
            return Outcome("planned", agreed)
        if agreed.unchanged:
            return Outcome("unchanged", agreed)
        if not confirm(agreed):
            return Outcome("declined", agreed)
    if not options.break_lock:
        settle.refuse_if_busy(seen)
    with lease.held(node, seen, observer, break_lock=options.break_lock):
        now, settled = _settle(node, seen, patch, observer)
        planned = agreed if agreed is not None and now is seen else make_plan(now, target, patch, wanted)
        if options.dry_run:
            return Outcome("planned", planned, settled=settled)
        if planned.unchanged:
            return Outcome("unchanged", planned, settled=settled)
        if planned != agreed and not confirm(planned):
            return Outcome("declined", planned, settled=settled)
        return replace(_carry_out(node, now, planned, options, observer), settled=settled)


def make_plan(seen: Survey, target: Target, patch: Patch, wanted: Mapping[str, Any]) -> SetPlan:
    """Plan a change of settings, or refuse it.

    Raises:
        DoesNotFitError: no server runs, the patch is not live in every rank, or its ranks cannot change together.
        ForeignEditError: somebody else's edit is in the way.
        LockedError: another surgeon is at work.
        UsageError: a setting is out of range for the served model.
    """
    server = seen.server
    if server is None:
        raise restart.no_server(seen, target)
    _refuse_unfinished(seen)
    _refuse_state(seen, patch)
    ranks = _ranks(seen, server, patch)
    before = {name: ranks[0].settings.get(name, default) for name, default in patch.settings.items()}
    settings = patch.complete(wanted, before)
    patch.check(settings)
    warnings = plan.check_settings(seen, patch, settings)
    if not settings["enabled"] and any(wanted.get(name) is not None for name in wanted if name != "enabled"):
        warnings.append(f"{patch.name} is off and stays off; --on turns it on")
    present = seen.beside.get("settings") or {}
    generation, in_file = proof.present_settings(present.get("text"), settings)
    unchanged = ""
    if settings == before and in_file and generation == ranks[0].generation:
        unchanged = f"already in force in every rank: {say(patch, settings)}"
    return SetPlan(
        patch=patch,
        server=server,
        path=seen.beside_path(f"{patch.module}.json"),
        version=seen.installed.version,
        present=present.get("sha256"),
        before=before,
        settings=settings,
        generation=proof.next_generation(seen),
        unchanged=unchanged,
        warnings=tuple(warnings),
    )


def say(patch: Patch, settings: Mapping[str, Any]) -> str:
    """Settings in one line, and whether they do anything."""
    return patch.say({**settings, "enabled": True}) if settings.get("enabled") else "off"


def _refuse_unfinished(seen: Survey) -> None:
    if seen.ledger.pending is not None or settle.is_down(seen):
        settle.refuse_if_busy(seen)
        raise DoesNotFitError(
            settle.unfinished(seen),
            advice="finish that first: `surgeon restart`, or `surgeon rollback`",
            where="ledger",
            code="unfinished",
        )


def _refuse_state(seen: Survey, patch: Patch) -> None:
    state = plan.examine(seen, patch).state
    if state.state is PatchState.FOREIGN_EDIT:
        raise ForeignEditError(
            state.why, advice="look at it with `surgeon diff`; reinstall the package, or put its file back"
        )
    if state.state not in {PatchState.LIVE, PatchState.WRITTEN_NOT_LIVE}:
        raise DoesNotFitError(
            f"{patch.name} is not live here: {state.state.value} ({state.why})",
            advice=f"`surgeon apply {patch.name}` puts it in and restarts the server",
            where=seen.file.path,
            code="not-live",
        )
    if not seen.file.writable:
        raise DoesNotFitError(
            f"the settings beside {seen.file.path} cannot be replaced: {seen.file.why_not}",
            advice="run surgeon as the owner of the package, or make its folder writable",
            where=seen.file.path,
            code="read-only",
        )


def _ranks(seen: Survey, server: Server, patch: Patch) -> list[beacons.Switch]:
    """What every rank of the server says, which must be the same.

    Raises:
        DoesNotFitError: a rank does not run this patch, or cannot change while it runs, or they differ.
    """
    again = f"`surgeon apply {patch.name}` restarts the server with the settings that are wanted"
    problems = beacons.judge(seen.beacons, server.workers, patch_hash=patch.hash)
    if problems:
        started = [seen.file.path] if not proof.still_running(seen) else []
        raise DoesNotFitError(
            f"{patch.name} does not run in every rank: {problems[0]}"
            + ("; the server may have been started before the patch was written" if started else ""),
            advice=f"`surgeon restart` starts it with what is written; {again}",
            where=f"pid {server.pid}",
            code="not-live",
        )
    ranks = beacons.switches(seen.beacons, server.workers)
    fixed = next((rank for rank in ranks if rank.generation is None), None)
    if fixed is not None:
        raise DoesNotFitError(
            f"{fixed.name} cannot change its settings while it runs: it is told of no forward passes",
            advice=again,
            where=f"pid {server.pid}",
            code="no-announce",
        )
    own = [beacons.beacon_of(worker, seen.beacons) for worker in server.workers]
    if any(one is not None and one.get("settings_source") == "environment" for one in own):
        raise DoesNotFitError(
            "SGLANG_OEA_K0 in the server's environment overrides the settings file",
            advice="unset it where the server is started",
            where="SGLANG_OEA_K0",
            code="overridden",
        )
    if _nodes(server) > 1:
        raise DoesNotFitError(
            "the server spans several nodes, and settings are written on this one only",
            advice=f"on each node, {again}",
            where=f"pid {server.pid}",
            code="several-nodes",
        )
    if any((rank.generation, rank.settings) != (ranks[0].generation, ranks[0].settings) for rank in ranks):
        listed = "; ".join(f"{rank.name} has generation {rank.generation}" for rank in ranks)
        raise DoesNotFitError(
            f"the ranks run with different settings: {listed}",
            advice="`surgeon restart` starts all of them with the settings file",
            where=f"pid {server.pid}",
            code="ranks-differ",
        )
    return ranks


def _nodes(server: Server) -> int:
    """How many nodes the server was asked to span."""
    for place, word in enumerate(server.argv):
        name, _, value = word.partition("=")
        if name == "--nnodes":
            value = value or "".join(server.argv[place + 1 : place + 2])
            return int(value) if value.isdigit() else 1
    return 1


def _unfinished_set(seen: Survey) -> bool:
    """Whether an earlier change of settings was cut short, which needs no restart to be finished or undone."""
    pending = seen.ledger.pending
    return pending is not None and pending.kind == "set"


def _settle(node: Node, seen: Survey, patch: Patch, observer: Observer) -> tuple[Survey, Settled | None]:
    """Close a change of settings that was cut short; whatever else is pending needs a command that may restart."""
    settled: Settled | None = None
    while _unfinished_set(seen):
        seen = survey.take(node, node.target, patch, http=False)
        done = settle.settle(node, seen, patch, observer)
        if done is None:
            break
        settled = done
        observer.note(done.said)
        seen = survey.take(node, node.target, patch, http=False)
    return seen, settled


def _carry_out(node: Node, seen: Survey, planned: SetPlan, options: Options, observer: Observer) -> Outcome:
    switch = switching.Switching(node, seen, planned.server, planned.patch, observer)
    passes = switch.wait_until_quiet(options.wait_s)
    with switching_back.put_back_on_failure(switch, planned.before) as attempt:
        with observer.step("Writing the settings") as step:
            revision = switch.write(attempt, planned.settings, planned.generation, passes, planned.present)
            step.done(f"revision {revision}, to hold from pass {attempt.at_pass} on")
        armed = switch.demand_armed(attempt)
        forced, from_pass = switch.carry_over(attempt)
        switch.close(revision, "applied", (armed, forced))
    return Outcome("set", planned, revision, from_pass, (armed, forced))
