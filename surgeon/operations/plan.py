"""What an apply would do, decided before anything is touched. Dry run, confirmation and ``--json`` show this object."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from surgeon.errors import DoesNotFitError, ForeignEditError, SurgeonError, UsageError
from surgeon.ledger.state import FileFacts, PatchState, Verdict, judge_disk, judge_live
from surgeon.operations import memory, proof, served

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surgeon.operations.survey import Survey
    from surgeon.patches import Patch
    from surgeon.surgery import Grafted
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


@dataclass(frozen=True)
class Findings:
    """What a survey means for one patch.

    Attributes:
        located: what the locator found in the file.
        state: the patch's state, the running server and its beacons included.
        live: whether the served model takes the code that is cut; None if nothing is served.
    """

    located: Located
    state: Verdict
    live: LivePath | None


def examine(survey: Survey, patch: Patch) -> Findings:
    """Judge a survey: where the site is, in which state the patch is, and whether it would be reached."""
    from surgeon import surgery

    file = survey.file
    located = memory.locate(file.source)
    grafted = located if isinstance(located, surgery.AlreadyGrafted) else None
    beside = {str(f["path"]): f.get("sha256") for f in survey.beside.values() if f}
    runtime = survey.beside_path(f"{patch.module}.py")
    settings = survey.beside_path(f"{patch.module}.json")
    disk = judge_disk(
        FileFacts(
            path=file.path,
            sha256=file.sha256,
            record_sha256=file.record_sha256,
            grafted=grafted is not None,
            stamp=grafted.stamp if grafted else "",
            fits=grafted is not None or isinstance(located, surgery.Found),
            upstream=located.reason if isinstance(located, surgery.NotNeeded) else "",
            beside={runtime: beside.get(runtime), settings: beside.get(settings)},
        ),
        survey.ledger,
        stamp=patch.stamp,
    )
    return Findings(located, _with_server(survey, patch, disk), _live_path(survey))


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
            f"{file.path}: {state.why}",
            advice="look at it with `surgeon diff`; reinstall the package, or put its file back, then try again",
            where=file.path,
        )
    settings = {**patch.settings, **{k: v for k, v in wanted.items() if v is not None}}
    warnings = [*check_settings(survey, settings), *_hard_links(survey)]
    original, grafted = cut(file.source, patch, file.path)
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
    if not file.writable:
        raise DoesNotFitError(
            f"{file.path} cannot be replaced: {file.why_not}",
            advice="run surgeon as the owner of the package, or make its folder writable",
            where=file.path,
            code="read-only",
        )
    serving = survey.server is not None
    if restart:
        refuse_supervised(survey)
    files = _files(survey, patch, settings, original, grafted.result)
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
        diff=surgery.unified_diff(file.source, grafted.result, file.path.lstrip("/")),
        files=files,
        restart=restart and serving,
        unchanged=unchanged,
        warnings=tuple(warnings),
    )


def cut(source: bytes, patch: Patch, path: str) -> tuple[bytes, Grafted]:
    """Take an earlier graft out of a file, and put this one in.

    Args:
        source: the file as it is.
        patch: what is cut in.
        path: the file's, for the refusals.

    Returns:
        The file without any graft, and the grafted one.

    Raises:
        DoesNotFitError: there is no site, or the file does not parse.
        ForeignEditError: somebody has edited the earlier graft.
    """
    from surgeon import surgery

    spec = surgery.GraftSpec(patch=patch.name, version=patch.version, stamp=patch.stamp, wants=patch.wants)
    try:
        grafted_before = isinstance(surgery.locate(source), surgery.AlreadyGrafted)
        original = surgery.ungraft(source) if grafted_before else source
        memory.locate(original)
        return original, surgery.graft(original, spec)
    except SurgeonError as error:
        error.message = f"{path}: {error.message}"
        error.where = f"{path}, {error.where}" if error.where else path
        raise


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
    survey: Survey, patch: Patch, settings: Mapping[str, Any], original: bytes, result: bytes
) -> tuple[PlannedFile, ...]:
    # The runtime goes first and the file that calls it last: whoever imports in between finds a whole pair.
    file = survey.file
    runtime_path = survey.beside_path(f"{patch.module}.py")
    settings_path = survey.beside_path(f"{patch.module}.json")
    runtime = survey.beside.get("runtime") or {}
    present = survey.beside.get("settings") or {}
    generation, same = proof.present_settings(present.get("text"), settings)
    files: list[PlannedFile] = []
    if runtime.get("sha256") != _sha(patch.runtime):
        files.append(PlannedFile(runtime_path, patch.runtime, runtime.get("sha256"), None))
    if not same:
        content = patch.settings_file(settings, generation=generation + 1, beacon_dir=proof.beacon_dir(survey))
        files.append(PlannedFile(settings_path, content, present.get("sha256"), None))
    if result != file.source:
        files.append(PlannedFile(file.path, result, file.sha256, _sha(original)))
    return tuple(files)


def check_settings(survey: Survey, settings: Mapping[str, Any]) -> list[str]:
    """Refuse settings that the served model or the server's environment rules out; return warnings.

    Raises:
        UsageError: k0 is outside 1..k.
        DoesNotFitError: the server's environment overrides the setting.
    """
    k0 = int(settings["k0"])
    where = (survey.model or {}).get("path")
    found = top_k(survey)
    warnings: list[str] = []
    if found is None:
        if k0 < 1:
            raise UsageError(f"k0 is {k0}; expected at least 1", where="--k0")
        warnings.append(f"k is unknown ({where or 'no model is served'}), so k0 = {k0} could not be checked against it")
    elif not 1 <= k0 <= found[1]:
        raise UsageError(
            f"k0 is {k0}; expected 1..{found[1]}: this model uses k = {found[1]} experts per token "
            f"({found[0]} in {where}/config.json)",
            advice=f"choose --k0 below {found[1]}; {found[1]} changes nothing",
            where="--k0",
        )
    if survey.server is not None:
        override = survey.server.env.get("SGLANG_OEA_K0")
        if override is not None and override != str(k0):
            raise DoesNotFitError(
                f"the server's environment sets SGLANG_OEA_K0={override}, which overrides k0 = {k0}",
                advice="unset it where the server is started, or ask for that k0",
                where="SGLANG_OEA_K0",
                code="overridden",
            )
    return warnings


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
    return [f"{links}; only this environment's copy is replaced, the others keep the original"]


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
