"""The story of ``surgeon record routing``: have the server's own recorder look, fetch its file, say what it saw."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from packaging.version import InvalidVersion, Version

from surgeon.bench import recording, shape
from surgeon.errors import DoesNotFitError, SurgeonError, UsageError
from surgeon.operations import restart, survey
from surgeon.operations.subject import option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surgeon.bench.shape import Shape
    from surgeon.node.client import Node
    from surgeon.node.target import Target
    from surgeon.operations.observer import Observer
    from surgeon.operations.survey import Survey
    from surgeon.server.model import Server

MODES: Final = ("per_pass", "per_token", "stat", "stat_approx")
FLAG: Final = "--expert-distribution-recorder-mode"
FILE_LIMIT: Final = 256 << 20
_REQUEST_S: Final = 60.0
_LOAD_S: Final = 300.0
_WRITE_S: Final = 60.0
_PATHS: Final = {name: f"/{name}_expert_distribution_record" for name in ("start", "stop", "dump")}
# Until 0.5.21 a fused shared expert's column is counted outside of the recorder's tensor.
_COUNTS_SHARED: Final = Version("0.5.21")
MARK: Final = "SURGEON-RECORDINGS:"

# Runs on the node under the server's interpreter, as its user and with its environment: waits until the recorder has
# written as many whole files as there are ranks, or removes files that it wrote. Files written before are another's.
LOOK: Final = f"""
import json, os, re, sys, time, zipfile
asked = json.loads(sys.argv[1])
folder = os.path.abspath(os.environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR") or "/tmp")
def whole():
    found = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        match = re.fullmatch(r"expert_distribution_recorder_([0-9.]+?)(?:_([0-9]+))?[.]pt", name)
        path = os.path.join(folder, name)
        if match and float(match.group(1)) >= asked["since"] and zipfile.is_zipfile(path):
            found.append({{"path": path, "size": os.path.getsize(path), "rank": int(match.group(2) or 0)}})
    return found
for path in asked["remove"]:
    os.unlink(path)
until = time.monotonic() + asked["wait_s"]
while len(whole()) < asked["files"] and time.monotonic() < until:
    time.sleep(0.1)
print("\\n{MARK}" + json.dumps({{"folder": folder, "files": whole()}}))
"""


@dataclass(frozen=True)
class Load:
    """Requests that surgeon sends itself, with prompts of random tokens.

    Attributes:
        in_flight: how many at once.
        tokens: that each generates.
        rounds: how often.
        prompt: tokens of each prompt.
        seed: of the prompts.
    """

    in_flight: int
    tokens: int = 32
    rounds: int = 2
    prompt: int = 64
    seed: int = 1

    def bodies(self, vocabulary: int) -> list[dict[str, Any]]:
        """The body of one request to /generate per round; the server takes each apart into ``in_flight`` requests."""
        numbers = random.Random(self.seed)  # noqa: S311 - prompts, not secrets
        parameters = {"temperature": 1.0, "max_new_tokens": self.tokens, "ignore_eos": True}
        return [
            {
                "input_ids": [
                    [numbers.randrange(vocabulary) for _ in range(self.prompt)] for _ in range(self.in_flight)
                ],
                "sampling_params": parameters,
            }
            for _ in range(self.rounds)
        ]


@dataclass(frozen=True)
class Outcome:
    """What was recorded.

    Attributes:
        server: which one.
        mode: the recorder's.
        model: its shape.
        summary: what decode looked like.
        data: the file of the first rank, as the server wrote it.
        passes: all passes of that file.
        ranks: how many files were written.
        notes: what a person should know about it.
    """

    server: Server
    mode: str
    model: Shape
    summary: recording.Summary
    data: bytes
    passes: int
    ranks: int
    notes: tuple[str, ...]


def run(
    node: Node,
    target: Target,
    observer: Observer,
    *,
    seconds: float,
    load: Load | None = None,
    max_rows: int = recording.MAX_ROWS,
) -> Outcome:
    """Record what the running server routes, and put its recorder back to rest.

    Args:
        node: where.
        target: which server.
        observer: is told.
        seconds: how long to listen to the server's own traffic; not used with a load.
        load: what to send; None sends nothing.
        max_rows: most rows of a pass that is taken for decode where the recorder does not say.

    Raises:
        DoesNotFitError: no server runs, its recorder is off or may not be disturbed, or nothing was decoded.
        SurgeonError: the server stopped answering, or wrote no file.
    """
    seen = survey.take(node, target)
    if seen.server is None:
        raise restart.no_server(seen, target)
    mode = ready(seen)
    model = shape.parse(seen.model_config, seen.server.model_path)
    _record(node, seen.server, observer, seconds, load.bodies(_vocabulary(seen)) if load else [])
    files = _dump(node, seen, observer, mode)
    if always_on(seen.server.argv):
        _http(
            node, seen.server, [{"method": "POST", "path": _PATHS["start"], "timeout_s": _REQUEST_S}], _REQUEST_S + 10
        )
        observer.note("the recorder was on for the server's own metrics, and is on again")
    try:
        data = _fetch(node, files[0], observer)
    finally:
        _look(node, seen, remove=[one["path"] for one in files])
    passes = recording.read(str(files[0]["path"]), data, top_k=model.top_k)
    summary = recording.summarize(passes, experts=model.experts, top_k=model.top_k, max_rows=max_rows)
    notes = _notes(seen, mode, load)
    if not mode.startswith("stat") and len(files) < len(seen.server.workers):
        notes = (f"{len(files)} of {len(seen.server.workers)} ranks wrote a file within {_WRITE_S:g} s", *notes)
    return Outcome(seen.server, mode, model, summary, data, len(passes), len(files), notes)


def ready(seen: Survey) -> str:
    """The mode of the running server's recorder, if it can be used without harm.

    Its endpoints are there in every release from 0.4.6 on, whatever the mode. Where it is off they raise inside the
    scheduler's loop, which ends the server (0.5.9 was seen to): they are called only if the server says that it is on.

    Raises:
        DoesNotFitError: it is off, or the server uses it itself, or recording would end the server.
    """
    info = seen.server_info or {}
    argv = list(seen.server.argv) if seen.server else []
    mode = info.get("expert_distribution_recorder_mode") or option(argv, FLAG)
    if info.get("enable_eplb") or "--enable-eplb" in argv:
        raise DoesNotFitError(
            "the server moves experts by what its recorder counts (EPLB); expected a recorder that nobody else uses",
            advice="record on a server that runs without --enable-eplb",
            code="recorder-in-use",
        )
    if mode not in MODES:
        found = "it is off" if seen.server_info is not None else "the server does not say, nor does its command line"
        raise DoesNotFitError(
            f"the server's recorder must have been switched on when it was started; found: {found}",
            advice=f"start the server again with {FLAG} per_pass; recording without it would end the server",
            where=FLAG,
            code="recorder-off",
        )
    shared = int(seen.model_config.get("n_shared_experts") or 0)
    if shared and not _bounded(seen.installed.version) and not _unfused(info, argv):
        raise DoesNotFitError(
            f"sglang {seen.installed.version} counts fused shared experts outside of its recorder's tensor, which may "
            "end a server on GPUs; expected 0.5.21 or later, or shared experts that are not fused",
            advice="start the server again with --disable-shared-experts-fusion",
            where="--disable-shared-experts-fusion",
            code="recorder-unsafe",
        )
    return str(mode)


def always_on(argv: Sequence[str]) -> bool:
    """Whether the server's recorder runs from its start, for the balance of experts that the server reports.

    ``--enable-expert-distribution-metrics`` until 0.5.19, ``--expert-balancedness-report-mode`` from 0.5.18.
    """
    mode = option(argv, "--expert-balancedness-report-mode")
    return "--enable-expert-distribution-metrics" in argv or mode not in {None, "off"}


def _bounded(version: str) -> bool:
    try:
        return Version(version) >= _COUNTS_SHARED
    except InvalidVersion:
        return False


def _unfused(info: Mapping[str, Any], argv: Sequence[str]) -> bool:
    return bool(info.get("disable_shared_experts_fusion")) or "--disable-shared-experts-fusion" in argv


def _vocabulary(seen: Survey) -> int:
    size = seen.model_config.get("vocab_size")
    if type(size) is not int or size < 1:
        raise DoesNotFitError(
            "the served model's config.json has no vocab_size, from which prompts are drawn",
            advice="record the server's own traffic: leave --load out",
            code="no-vocabulary",
        )
    return size


def _record(
    node: Node, server: Server, observer: Observer, seconds: float, bodies: Sequence[Mapping[str, Any]]
) -> None:
    """Start the recorder, wait or work, and stop it: in one round trip, so that it ends even if we are gone by then."""
    work = [{"method": "POST", "path": "/generate", "json": body, "timeout_s": _LOAD_S} for body in bodies]
    requests = [
        {"method": "POST", "path": _PATHS["start"], "timeout_s": _REQUEST_S},
        *work,
        {
            "method": "POST",
            "path": _PATHS["stop"],
            "timeout_s": _REQUEST_S,
            "after_s": 0.0 if work else seconds,
        },
    ]
    title = f"Recording: {len(work)} rounds of our own requests" if work else f"Recording for {seconds:g} s"
    deadline = (0.0 if work else seconds) + _LOAD_S * len(work) + 2 * _REQUEST_S + 10
    with observer.step(title):
        try:
            answers = _http(node, server, requests, deadline)
        except BaseException:
            # The agent goes on by itself, unless it was what failed; stopping twice does no harm.
            _stop(node, server, observer)
            raise
        first, *rest = zip(requests, answers, strict=True)
        for request, answer in (first, rest[-1], *rest[:-1]):
            _expect_done(request, answer, server)


def _stop(node: Node, server: Server, observer: Observer) -> None:
    try:
        _http(node, server, [{"method": "POST", "path": _PATHS["stop"], "timeout_s": 10.0}], 15.0)
    except SurgeonError as error:
        observer.warn(f"the recorder of the server on port {server.port} may still be on: {error.message}")
    else:
        observer.note("the recorder was stopped")


def _http(node: Node, server: Server, requests: Sequence[Mapping[str, Any]], deadline_s: float) -> list[dict[str, Any]]:
    asked = {"port": server.port, "pid": server.pid, "requests": list(requests)}
    return list(node.call("http", asked, deadline_s=deadline_s)["responses"])


def _expect_done(request: Mapping[str, Any], answer: Mapping[str, Any], server: Server) -> None:
    status = answer.get("status")
    if status == 200:  # noqa: PLR2004 - HTTP's OK
        return
    if status is None:
        raise SurgeonError(
            f"the server (pid {server.pid}) stopped answering while it was recorded: {answer.get('error')}",
            advice="see `surgeon logs`; if it has ended, its recorder ended with it: `surgeon restart`",
            where=str(request["path"]),
            code="server-gone",
        )
    said = " ".join(str(answer.get("body") or "").split())[:200]
    raise SurgeonError(
        f"the server answered {status} to {request['path']}; expected 200" + (f": {said}" if said else ""),
        advice="see `surgeon logs`",
        where=str(request["path"]),
        code="server-refused",
    )


def _dump(node: Node, seen: Survey, observer: Observer, mode: str) -> list[dict[str, Any]]:
    """Have the recorder write its files and wait for all of them; the first rank's first."""
    server = seen.server
    assert server is not None  # noqa: S101 - run has looked
    files = 1 if mode.startswith("stat") else max(1, len(server.workers))
    with observer.step("Writing the recording") as step:
        request = {"method": "POST", "path": _PATHS["dump"], "timeout_s": _REQUEST_S}
        (answer,) = _http(node, server, [request], _REQUEST_S + 10)
        _expect_done(request, answer, server)
        # Rank 0 answers for all, while the others may still be writing.
        said = _look(node, seen, files=files, wait_s=_WRITE_S)
        found = sorted(said["files"], key=lambda one: (one["rank"], one["path"]))
        if not found:
            raise SurgeonError(
                f"the server's recorder wrote no file to {said['folder']}; expected {files}",
                advice="see `surgeon logs`; the folder is SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR of the server",
                where=str(said["folder"]),
                code="no-recording",
            )
        step.done(
            f"{len(found)} file{'' if len(found) == 1 else 's'}, {sum(one['size'] for one in found) / 1e6:.1f} MB"
        )
    return found


def _look(
    node: Node, seen: Survey, *, files: int = 0, wait_s: float = 0.0, remove: Sequence[str] = ()
) -> dict[str, Any]:
    since = float(seen.node.get("time") or 0.0)
    asked = {"since": since, "files": files, "wait_s": wait_s, "remove": list(remove)}
    answer = node.call(
        "run",
        {
            "code": LOOK,
            "argv": [json.dumps(asked)],
            "pid": seen.server.pid if seen.server else None,
            "python": seen.installed.python,
            "timeout_s": wait_s + 30,
        },
        deadline_s=wait_s + 40,
    )
    lines = [line for line in str(answer["stdout"]).splitlines() if line.startswith(MARK)]
    if not lines:
        last = " / ".join(str(answer["stderr"]).strip().splitlines()[-2:]) or "nothing was said"
        raise SurgeonError(f"the recorder's folder could not be looked at on the node: {last}", code="no-recording")
    return dict(json.loads(lines[-1].removeprefix(MARK)))


def _fetch(node: Node, file: Mapping[str, Any], observer: Observer) -> bytes:
    path, size = str(file["path"]), int(file["size"])
    if size > FILE_LIMIT:
        raise UsageError(
            f"the recording has {size / 1e6:.0f} MB; expected at most {FILE_LIMIT / 1e6:.0f}",
            advice="record for a shorter time: --seconds",
            where=path,
        )
    with observer.step("Fetching it"):
        # Two megabytes a second is a slow line.
        answer = node.call("read", {"path": path, "max_bytes": FILE_LIMIT}, deadline_s=30 + size / 1e6)
        if not answer.get("exists"):
            raise SurgeonError(f"{path} is gone from the node before it could be read", where=path, code="no-recording")
        return base64.b64decode(answer["b64"])


def _notes(seen: Survey, mode: str, load: Load | None) -> tuple[str, ...]:
    info, notes = seen.server_info or {}, []
    if seen.beside.get("runtime"):
        notes.append("the patch is on this node: what was recorded is with it, as far as it is live (`surgeon status`)")
    if load is not None:
        notes.append("the load's prompts are random tokens, which real text is not: record real traffic to decide by")
    if mode != "per_token":
        notes.append("the recorder does not say which passes decode: those of few rows are taken to")
    notes.append("rows that pad a captured CUDA graph are counted like real ones")
    if info.get("enable_dp_attention"):
        notes.append("under DP attention the first rank's file holds that rank's rows only")
    if int(info.get("pp_size") or 1) > 1:
        notes.append("under pipeline parallelism the first rank's file holds that rank's layers only")
    return tuple(notes)
