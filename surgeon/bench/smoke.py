"""The smoke benchmark: sglang's own serving benchmark, run under the server's interpreter, offline.

It answers whether the server serves right under load, not whether a patch pays: one short run has a noise of its own
(on a loaded 2-core machine a factor of two between runs of one server was seen). Tokens are counted by the server:
the benchmark's client falls back to the length it asked for when a reply decodes to no text, so the
``completion_tokens`` of each reply are counted beside it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MARK: Final = "SURGEON-BENCH:"

# Runs on the node under the server's interpreter, with the benchmark's own arguments. The result file lies in a folder
# of the server's user, who may be another than surgeon's. The module's name by release: sglang.benchmark.serving from
# 0.5.15, sglang.bench_serving before.
CODE: Final = f"""
import importlib.util, json, os, runpy, sys, tempfile
counted, order = {{}}, []
def watching(loads):
    def inner(data, *args, **kwargs):
        value = loads(data, *args, **kwargs)
        meta = value.get("meta_info") if type(value) is dict else None
        if type(meta) is dict and type(meta.get("completion_tokens")) is int:
            rid = meta.get("id")
            if rid not in counted:
                order.append(rid)
                counted[rid] = 0
            counted[rid] = max(counted[rid], meta["completion_tokens"])
        return value
    return inner
json.loads = watching(json.loads)
try:
    import orjson
    orjson.loads = watching(orjson.loads)
except ImportError:
    pass
folder = tempfile.TemporaryDirectory(prefix="surgeon-smoke-")
target = os.path.join(folder.name, "result.jsonl")
name = "sglang.bench_serving"
try:
    if importlib.util.find_spec("sglang.benchmark.serving"):
        name = "sglang.benchmark.serving"
except ModuleNotFoundError:
    pass
sys.argv = [name, *sys.argv[1:], "--output-file", target]
code = 0
try:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
except SystemExit as stop:
    code = stop.code if type(stop.code) is int else int(stop.code is not None)
said = {{}}
if os.path.exists(target):
    with open(target) as file:
        said = json.loads(file.read().strip().splitlines()[-1])
folder.cleanup()
said.pop("server_info", None)
report = {{"module": name, "code": code, "said": said, "tokens": [counted[r] for r in order]}}
print("\\n{MARK}" + json.dumps(report), flush=True)
"""


@dataclass(frozen=True)
class Load:
    """What is asked of the server. Lengths in tokens; the output length is forced (EOS is ignored)."""

    prompts: int = 32
    input_len: int = 64
    output_len: int = 32
    concurrency: int = 8
    seed: int = 1

    def argv(self, *, port: int, model: str) -> list[str]:
        """Arguments of sglang's benchmark; each exists in every release from 0.4.6 on."""
        return [
            *("--backend", "sglang", "--host", "127.0.0.1", "--port", str(port)),
            *("--model", model, "--tokenizer", model, "--dataset-name", "random-ids"),
            *("--random-input-len", str(self.input_len), "--random-output-len", str(self.output_len)),
            *("--random-range-ratio", "1.0", "--num-prompts", str(self.prompts)),
            *("--max-concurrency", str(self.concurrency), "--seed", str(self.seed), "--disable-tqdm"),
        ]


@dataclass(frozen=True)
class SmokeResult:
    """One run. Times in milliseconds, rates in tokens per second, tokens as the server counted them.

    ``patched`` says what was live while it ran: empty for the unpatched server, else the patch and its settings.
    """

    when: float
    patched: str
    module: str
    load: Load
    completed: int
    tokens: int
    duration_s: float
    output_tok_s: float
    itl_ms: float
    tpot_ms: float
    ttft_ms: float
    version: str
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every request came back whole."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As the node keeps it."""
        return asdict(self)


def parse_result(raw: Mapping[str, Any]) -> SmokeResult:
    """A result from the node's record."""
    known = {f: raw[f] for f in SmokeResult.__dataclass_fields__ if f in raw}
    return SmokeResult(**{**known, "load": Load(**raw["load"]), "problems": tuple(raw.get("problems") or ())})


def read_run(
    stdout: str, stderr: str, returncode: int, load: Load, *, when: float, patched: str, version: str
) -> SmokeResult:
    """The result of one run of CODE, with everything that was wrong in ``problems``."""
    report = next((json.loads(s.removeprefix(MARK)) for s in reversed(stdout.splitlines()) if s.startswith(MARK)), None)
    if report is None:
        last = (stderr.strip() or stdout.strip()).splitlines()[-3:]
        problem = f"sglang's benchmark ended with {returncode} and no result: {' / '.join(last) or 'nothing printed'}"
        return SmokeResult(when, patched, "", load, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, version, (problem,))
    said: Mapping[str, Any] = report["said"]
    # Warm-up requests come first and are not part of the measured run.
    counts = [int(n) for n in report["tokens"]][-load.prompts :]
    duration = float(said.get("duration") or 0.0)
    tokens = sum(counts)
    return SmokeResult(
        when=when,
        patched=patched,
        module=str(report["module"]),
        load=load,
        completed=int(said.get("completed") or 0),
        tokens=tokens,
        duration_s=duration,
        output_tok_s=tokens / duration if duration else 0.0,
        itl_ms=float(said.get("median_itl_ms") or 0.0),
        tpot_ms=float(said.get("median_tpot_ms") or 0.0),
        ttft_ms=float(said.get("median_ttft_ms") or 0.0),
        version=version,
        problems=_problems(report, said, counts, load),
    )


def _problems(report: Mapping[str, Any], said: Mapping[str, Any], counts: list[int], load: Load) -> tuple[str, ...]:
    found: list[str] = []
    if report.get("code"):
        found.append(f"sglang's benchmark ended with {report['code']}")
    completed = int(said.get("completed") or 0)
    if completed != load.prompts:
        found.append(f"{completed} of {load.prompts} requests were completed")
    short = [n for n in counts if n != load.output_len]
    if not counts:
        found.append("the server counted no tokens")
    elif short:
        found.append(f"{len(short)} requests got {min(short)}..{max(short)} tokens; {load.output_len} were asked for")
    return tuple(found)


def last_unpatched(results: list[Mapping[str, Any]], load: Load, version: str) -> SmokeResult | None:
    """The newest result of the unpatched server under the same load and release."""
    for raw in reversed(results):
        result = parse_result(raw)
        if not result.patched and result.passed and result.load == load and result.version == version:
            return result
    return None
