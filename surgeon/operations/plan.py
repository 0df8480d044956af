"""What an apply would do, decided before anything is touched. Dry run, confirmation and ``--json`` show this object."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import DoesNotFitError, ForeignEditError, UsageError
from surgeon.ledger.state import FileFacts, PatchState, Verdict, judge_disk, judge_live
from surgeon.operations import grafts, memory, proof, served

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surgeon.operations.survey import Survey, TargetFile
    from surgeon.patches import Patch
    from surgeon.surgery import Outcome as Located
    from surgeon.surgery.live_path import Verdict as LivePath

# config.json fields that hold k, the number of routed experts a token uses; by architecture family.
TOP_K_FIELDS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class PlannedFile:
    """One file that would be written.

    Attributes:
        path: on the node.
        content: the new bytes; None removes the file.
        expect: sha256 that must be there now; None: the file must not exist.
        original: sha256 of the file as its package installed it; None if the package does not bring it.
    """

    path: str
    content: bytes | None = field(repr=False)
    expect: str | None
    original: str | None


@dataclass(frozen=True)
class Plan:
    """What would be done, and why it may be done.

    Attributes:
        unchanged: why nothing needs to be done; empty if something does.
        files: what would be written, in the order of writing.
        restart: whether the server would be restarted.
        warnings: what a person should know before saying yes.
        gate: how the runtime will tell decode from prefill.
    """

    patch: Patch = field(repr=False)
    settings: Mapping[str, Any]
    path: str
    version: str
    state: Verdict
    live: LivePath | None
    diff: str = field(repr=False)
    files: tuple[PlannedFile, ...]
    restart: bool
    unchanged: str = ""
    warnings: tuple[str, ...] = ()
    gate: grafts.DecodeGate = field(default_factory=lambda: grafts.DecodeGate(exact=True))


@dataclass(frozen=True)
class Findings:
    """What a survey means for one patch.

    Attributes:
        located: what the locator found in topk.py.
        state: the patch's state, the running server and its beacons included.
        live: whether the served model takes the code that is cut; None if nothing is served.
        runner: what the locator found in model_runner.py; None if it is not there, or of no use to the patch.
        gate: what that means for telling decode from prefill.
    """

    located: Located
    state: Verdict
    live: LivePath | None
    runner: Located | None
    gate: grafts.DecodeGate


def examine(survey: Survey, patch: Patch) -> Findings:
    """Judge a survey: where the sites are, in which state the patch is, and whether it would be reached."""
    file = survey.file
    located = memory.locate(file.source)
    names = [f"{module.name}.py" for module in patch.shipped] + [f"{patch.module}.json"]
    hashes = survey.hashes
    beside = {path: hashes.get(path) for path in map(survey.beside_path, names)}
    disk = judge_disk(_facts(file, located, beside), survey.ledger, stamp=patch.stamp)
    runner, gate = grafts.look_at_runner(survey.runner.source if survey.runner else None, patch)
    if survey.runner is not None and runner is not None:
        other = judge_disk(_facts(survey.runner, runner, {}), survey.ledger, stamp=patch.stamp)
        disk = _together(disk, other, survey.runner.path)
    return Findings(located, _with_server(survey, patch, disk), _live_path(survey), runner, gate)


def _facts(file: TargetFile, located: Located, beside: dict[str, str | None]) -> FileFacts:
    from surgeon import surgery

    grafted = located if isinstance(located, surgery.AlreadyGrafted) else None
    return FileFacts(
        path=file.path,
        sha256=file.sha256,
        record_sha256=file.record_sha256,
        grafted=grafted is not None,
        stamp=grafted.stamp if grafted else "",
        fits=grafted is not None or isinstance(located, surgery.Found),
        upstream=located.reason if isinstance(located, surgery.NotNeeded) else "",
        beside=beside,
    )


def _together(first: Verdict, second: Verdict, path: str) -> Verdict:
    """One state for two files: what is wrong with the second counts where the first is as it should be.

    A second file that holds no graft is no fault: an earlier version had none, or found no place there.
    """
    if first.state is PatchState.FOREIGN_EDIT or second.state is PatchState.DOES_NOT_FIT:
        return first
    graft_wrong = first.state is PatchState.APPLIED and second.state in {PatchState.STALE, PatchState.REINSTALLED}
    if second.state is PatchState.FOREIGN_EDIT or graft_wrong:
        return Verdict(second.state, f"{path}: {second.why}", second.revision or first.revision)
    return first


def _with_server(survey: Survey, patch: Patch, disk: Verdict) -> Verdict:
    if not disk.state.on_disk and proof.still_running(survey):
        why = f"{disk.why}; but the running server still runs the patch, until `surgeon restart`"
        return Verdict(disk.state, why, disk.revision)
    if disk.revision is None:
        return disk
    server = survey.server
    problems = proof.beacon_problems(survey, patch) if server else ()
    return judge_live(
        disk,
        written_at=disk.revision.started,
        server_started=server.started if server else None,
        beacon_problems=problems,
    )


def _live_path(survey: Survey) -> LivePath | None:
    what = served.of(survey)
    return what.live(survey.installed.version) if what else None


def make(survey: Survey, patch: Patch, wanted: Mapping[str, Any], *, restart: bool) -> Plan:
    """Plan an apply, or refuse it.

    Raises:
        DoesNotFitError: no site, upstream does this itself now, the routing bypasses the site, the folder cannot be
            written, or the server is not ours to restart.
        ForeignEditError: somebody else's edit is in the way.
        UsageError: a setting is out of range for the served model.
    """
    from surgeon import surgery

    file = survey.file
    findings = examine(survey, patch)
    state = findings.state
    if state.state is PatchState.FOREIGN_EDIT:
        raise ForeignEditError(
            state.why if str(file.path) in state.why else f"{file.path}: {state.why}",
            advice="look at it with `surgeon diff`; reinstall the package, or put its file back, then try again",
            where=file.path,
        )
    settings = patch.complete(wanted)
    warnings = [*check_settings(survey, patch, settings), *_hard_links(survey)]
    cuts = grafts.cut_all(survey, patch, findings.gate)
    live = findings.live
    if isinstance(live, surgery.NotReached):
        raise DoesNotFitError(
            f"the served model never takes this code: {live.why}",
            advice=live.remedy,
            where=file.path,
            code="not-reached",
        )
    if isinstance(live, surgery.CannotTell):
        warnings.append(f"cannot tell whether the served model takes this code without {', '.join(live.missing)}")
    if not findings.gate.exact:
        warnings.append(f"decode will be told from prefill by row count only: {findings.gate.why}")
    for one in cuts:
        if not one.file.writable:
            raise DoesNotFitError(
                f"{one.file.path} cannot be replaced: {one.file.why_not}",
                advice="run surgeon as the owner of the package, or make its folder writable",
                where=one.file.path,
                code="read-only",
            )
    serving = survey.server is not None
    if restart:
        refuse_supervised(survey)
    files = _files(survey, patch, settings, cuts)
    if serving and not restart:
        warnings.append("the running server keeps its old code until it is restarted")
    unchanged = ""
    if not files and (state.state is PatchState.LIVE or not serving or not restart):
        unchanged = (
            f"already applied: revision {state.revision.revision if state.revision else '?'}, {patch.say(settings)}"
        )
    return Plan(
        patch=patch,
        settings=settings,
        path=file.path,
        version=survey.installed.version,
        state=state,
        live=live,
        diff="".join(
            surgery.unified_diff(one.file.source, one.result, one.file.path.lstrip("/")) for one in reversed(cuts)
        ),
        files=files,
        restart=restart and serving,
        unchanged=unchanged,
        warnings=tuple(warnings),
        gate=findings.gate,
    )


def refuse_supervised(survey: Survey) -> None:
    """Refuse to restart a server that somebody else keeps running.

    Raises:
        DoesNotFitError: with the command to use instead.
    """
    keeper = survey.server.supervised if survey.server else None
    if survey.server is not None and keeper is not None:
        raise DoesNotFitError(
            f"the server (pid {survey.server.pid}) is kept by {keeper.kind} ({keeper.unit}), which restarts it; "
            "expected one that was started by hand",
            advice=f"{keeper.advice} With --no-restart, apply and rollback change the files only.",
            where=f"pid {survey.server.pid}",
            code="supervised",
        )


def _files(
    survey: Survey, patch: Patch, settings: Mapping[str, Any], cuts: tuple[grafts.Cut, ...]
) -> tuple[PlannedFile, ...]:
    # What is called goes first and the files that call it last: whoever imports in between finds a whole set.
    hashes = survey.hashes
    files: list[PlannedFile] = []
    for module in patch.shipped:
        path = survey.beside_path(f"{module.name}.py")
        if hashes.get(path) != _sha(module.content):
            files.append(PlannedFile(path, module.content, hashes.get(path), None))
    present = survey.beside.get("settings") or {}
    if not proof.present_settings(present.get("text"), settings)[1]:
        content = patch.settings_file(
            settings, generation=proof.next_generation(survey), beacon_dir=proof.beacon_dir(survey)
        )
        files.append(PlannedFile(survey.beside_path(f"{patch.module}.json"), content, present.get("sha256"), None))
    files += [
        PlannedFile(one.file.path, one.result, one.file.sha256, _sha(one.original))
        for one in cuts
        if one.result != one.file.source
    ]
    return tuple(files)


def check_settings(survey: Survey, patch: Patch, settings: Mapping[str, Any]) -> list[str]:
    """Refuse settings that the served model or the server's environment rules out; return warnings.

    Raises:
        UsageError: a k0 is outside 1..k.
        DoesNotFitError: the server's environment overrides the setting.
    """
    where = (survey.model or {}).get("path")
    found = top_k(survey)
    warnings: list[str] = []
    for value, option in patch.k0s(settings):
        if found is None and value < 1:
            raise UsageError(f"k0 is {value}; expected at least 1", where=option)
        if found is not None and not 1 <= value <= found[1]:
            raise UsageError(
                f"k0 is {value}; expected 1..{found[1]}: this model uses k = {found[1]} experts per token "
                f"({found[0]} in {where}/config.json)",
                advice=f"choose {option} below {found[1]}; {found[1]} changes nothing",
                where=option,
            )
    if found is None:
        unknown = f"k is unknown ({where or 'no model is served'})"
        warnings.append(f"{unknown}, so {patch.say(settings)} could not be checked against it")
    refuse_override(survey, settings)
    return warnings


def refuse_override(survey: Survey, settings: Mapping[str, Any]) -> None:
    """Refuse settings that SGLANG_OEA_K0 in the server's environment would win over.

    Raises:
        DoesNotFitError: with what it is set to.
    """
    override = survey.server.env.get("SGLANG_OEA_K0") if survey.server is not None else None
    if override is not None and override != str(settings["k0"]):
        raise DoesNotFitError(
            f"the server's environment sets SGLANG_OEA_K0={override}, which overrides k0 = {settings['k0']}",
            advice="unset it where the server is started, or ask for that k0",
            where="SGLANG_OEA_K0",
            code="overridden",
        )


def top_k(survey: Survey) -> tuple[str, int] | None:
    """The field of the served model's config that holds k, and k; None if neither is known."""
    return top_k_of(survey.model_config)


def top_k_of(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The field of a model's config.json that holds k, and k; None if it has none of them."""
    return next(((f, int(config[f])) for f in TOP_K_FIELDS if isinstance(config.get(f), int)), None)


def _hard_links(survey: Survey) -> list[str]:
    if survey.file.nlink <= 1:
        return []
    links = f"topk.py has {survey.file.nlink} hard links (uv shares files between environments)"
    return [f"{links}; only this environment's copies are replaced, the others keep the originals"]


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
