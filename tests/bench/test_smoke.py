"""The smoke benchmark: what is made of its result, and its code run for real against a server that streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.bench.smoke import CODE, MARK, Load, SmokeResult, last_unpatched, parse_result, read_run
from tests.support.generate_server import GenerateServer

if TYPE_CHECKING:
    from pathlib import Path

LOAD = Load(prompts=4, input_len=8, output_len=16, concurrency=2)

# The fields of one line of sglang 0.5.9's result file that matter here, and some that do not.
SAID: dict[str, Any] = {
    "backend": "sglang",
    "dataset_name": "random-ids",
    "request_rate": float("inf"),
    "max_concurrency": 2,
    "duration": 2.0,
    "completed": 4,
    "total_input_tokens": 32,
    "total_output_tokens": 999,
    "output_throughput": 499.5,
    "median_ttft_ms": 41.5,
    "median_tpot_ms": 7.25,
    "median_itl_ms": 6.5,
    "accept_length": None,
}


def printed(*, code: int = 0, tokens: list[int] | None = None, said: dict[str, Any] | None = None) -> str:
    """What CODE prints, with the benchmark's own table before it."""
    counts = [16] * 5 if tokens is None else tokens
    report = {"module": "sglang.bench_serving", "code": code, "said": SAID if said is None else said, "tokens": counts}
    return f"============ Serving Benchmark Result ============\n\n{MARK}{json.dumps(report)}\nbye\n"


def read(stdout: str, stderr: str = "", returncode: int = 0) -> SmokeResult:
    """The result of a run that printed this."""
    return read_run(stdout, stderr, returncode, LOAD, when=5.0, patched="", version="0.5.9")


def test_tokens_and_rate_are_the_servers_not_the_clients() -> None:
    """The client's own total (999) is ignored; the warm-up request, which comes first, is not counted."""
    result = read(printed(tokens=[3, 16, 16, 16, 16]))
    assert result == SmokeResult(
        when=5.0,
        patched="",
        module="sglang.bench_serving",
        load=LOAD,
        completed=4,
        tokens=64,
        duration_s=2.0,
        output_tok_s=32.0,
        itl_ms=6.5,
        tpot_ms=7.25,
        ttft_ms=41.5,
        version="0.5.9",
    )
    assert result.passed


@pytest.mark.parametrize(
    ("stdout", "problem"),
    [
        (printed(tokens=[16, 16, 9, 16, 12]), "2 requests got 9..12 tokens; 16 were asked for"),
        (printed(tokens=[16, 16, 17, 16, 16]), "1 requests got 17..17 tokens; 16 were asked for"),
        (printed(tokens=[]), "the server counted no tokens"),
        (printed(said=SAID | {"completed": 3}), "3 of 4 requests were completed"),
        (printed(code=1), "sglang's benchmark ended with 1"),
    ],
)
def test_what_went_wrong_is_named(stdout: str, problem: str) -> None:
    """Short and long answers, missing counts, lost requests, a non-zero end: each is a problem, so it does not pass."""
    result = read(stdout)
    assert result.problems == (problem,)
    assert not result.passed


def test_a_benchmark_that_wrote_nothing_has_every_number_at_zero() -> None:
    """It ended in order and left no result file: nothing is divided by, and it does not pass."""
    result = read(printed(code=2, tokens=[], said={}))
    assert (result.tokens, result.duration_s, result.output_tok_s, result.completed) == (0, 0.0, 0.0, 0)
    assert len(result.problems) == 3


@pytest.mark.parametrize(
    ("stdout", "stderr", "words"),
    [
        ("", "Traceback ...\n  line 1\nModuleNotFoundError: No module named 'aiohttp'\n", "No module named 'aiohttp'"),
        ("Killed\n", "", "Killed"),
        ("", "", "nothing printed"),
    ],
)
def test_a_run_without_a_result_says_its_last_words(stdout: str, stderr: str, words: str) -> None:
    """A benchmark that died is a problem with the exit status and the end of what it printed."""
    result = read(stdout, stderr, 137)
    (problem,) = result.problems
    assert "137" in problem
    assert words in problem
    assert result.tokens == 0


def test_a_result_comes_back_from_the_node_as_it_was_kept() -> None:
    """Through JSON and back; fields of a later surgeon are passed over."""
    result = replace(read(printed(tokens=[1, 2, 3, 4, 5])), patched="oea: k0 = 4")
    kept = json.loads(json.dumps(result.to_json() | {"unheard_of": 1}))
    assert parse_result(kept) == result


def test_the_last_unpatched_result_is_of_the_same_load_and_release() -> None:
    """A patched run, a failed one, another load or another release is nothing to compare with."""
    fit = replace(read(printed()), when=1.0)
    kept = [
        replace(fit, when=0.5),
        fit,
        replace(fit, when=2.0, patched="oea: k0 = 4"),
        replace(fit, when=3.0, problems=("the server counted no tokens",)),
        replace(fit, when=4.0, load=replace(LOAD, concurrency=8)),
        replace(fit, when=5.0, version="0.5.23"),
    ]
    assert last_unpatched([result.to_json() for result in kept], LOAD, "0.5.9") == fit
    assert last_unpatched([result.to_json() for result in kept[2:]], LOAD, "0.5.9") is None


# sglang's benchmark in small: its arguments, its way of reading the stream and of falling back to the length it asked
# for when a reply has no text, its result file. The older module reads with json, the newer one with orjson.
BENCHMARK = """
import argparse, json, sys, urllib.request
{import_line}
parser = argparse.ArgumentParser()
for name in ("backend", "host", "model", "tokenizer", "dataset-name", "output-file", "random-range-ratio"):
    parser.add_argument("--" + name)
for name in ("port", "random-input-len", "random-output-len", "num-prompts", "max-concurrency", "seed"):
    parser.add_argument("--" + name, type=int)
parser.add_argument("--disable-tqdm", action="store_true")
args = parser.parse_args()

def ask():
    body = {{"input_ids": [args.seed] * args.random_input_len,
             "sampling_params": {{"max_new_tokens": args.random_output_len, "ignore_eos": True}}, "stream": True}}
    url = f"http://{{args.host}}:{{args.port}}/generate"
    request = urllib.request.Request(url, json.dumps(body).encode(), {{"Content-Type": "application/json"}})
    length = args.random_output_len
    with urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request, timeout=30) as response:
        for line in response:
            chunk = line.strip().removeprefix(b"data: ")
            if chunk and chunk != b"[DONE]":
                data = {loads}(chunk)
                if data["text"]:
                    length = data["meta_info"]["completion_tokens"]
    return length

ask()
lengths = [ask() for _ in range(args.num_prompts)]
with open(args.output_file, "a") as file:
    file.write(json.dumps({{"duration": 0.5, "completed": len(lengths), "total_output_tokens": sum(lengths),
                           "server_info": {{"api_key": "secret"}}, "median_itl_ms": 1.0}}) + chr(10))
print("done", end="")
{last_line}
"""

ORJSON = "from json import loads as _loads\n\ndef loads(data):\n    return _loads(data)\n"


class Site:
    """A folder of stand-in packages, and CODE run with it on the import path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"
        self.scratch.mkdir()

    def benchmark(self, module: str, *, orjson: bool = False, last_line: str = "") -> None:
        """Install the small benchmark as that module."""
        path = self.folder / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(self.folder).parents[:-1]:
            (self.folder / parent / "__init__.py").touch()
        if orjson:
            (self.folder / "orjson.py").write_text(ORJSON, encoding="utf-8")
        text = BENCHMARK.format(
            import_line="import orjson" if orjson else "",
            loads="orjson.loads" if orjson else "json.loads",
            last_line=last_line,
        )
        path.write_text(text, encoding="utf-8")

    def run(self, server: GenerateServer) -> SmokeResult:
        """Run CODE as the agent runs it, and read what it printed."""
        done = subprocess.run(
            [sys.executable, "-c", CODE, *LOAD.argv(port=server.port, model="/models/tiny")],
            env={**os.environ, "PYTHONPATH": str(self.folder), "TMPDIR": str(self.scratch)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "secret" not in done.stdout
        return read(done.stdout, done.stderr, done.returncode)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An import path with nothing on it yet."""
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("module", "orjson"), [("sglang.bench_serving", False), ("sglang.benchmark.serving", True)], ids=["old", "new"]
)
def test_the_benchmark_runs_under_either_name_and_the_server_counts(site: Site, module: str, orjson: bool) -> None:  # noqa: FBT001 - a table's column
    """One warm-up and four requests, each answered in full; the result file is read and removed."""
    site.benchmark(module, orjson=orjson)
    with GenerateServer(lambda _, asked: asked) as server:
        result = site.run(server)
    assert (result.module, result.problems) == (module, ())
    assert (result.completed, result.tokens, result.output_tok_s) == (4, 64, 128.0)
    assert [len(request["input_ids"]) for request in server.requests] == [8] * 5
    assert not list(site.scratch.iterdir())


def test_where_both_names_exist_the_newer_one_is_run(site: Site) -> None:
    """Releases with sglang.benchmark.serving keep the old module as a stub."""
    site.benchmark("sglang.bench_serving", last_line="raise RuntimeError")
    site.benchmark("sglang.benchmark.serving", orjson=True)
    with GenerateServer(lambda _, asked: asked) as server:
        assert site.run(server).module == "sglang.benchmark.serving"


@pytest.mark.parametrize("orjson", [False, True], ids=["json", "orjson"])
def test_empty_texts_are_counted_by_the_server_too(site: Site, orjson: bool) -> None:  # noqa: FBT001 - a table's column
    """The client takes the length it asked for when a reply has no text; the count must be what the server says."""
    site.benchmark("sglang.bench_serving", orjson=orjson)
    with GenerateServer(lambda number, asked: asked - number, text=lambda _: "") as server:
        result = site.run(server)
    assert result.tokens == 15 + 14 + 13 + 12
    assert result.problems == ("4 requests got 12..15 tokens; 16 were asked for",)


def test_an_exit_status_of_the_benchmark_is_a_problem(site: Site) -> None:
    """A benchmark that wrote its result and still ended badly does not pass."""
    site.benchmark("sglang.bench_serving", last_line="sys.exit(3)")
    with GenerateServer(lambda _, asked: asked) as server:
        result = site.run(server)
    assert (result.tokens, result.problems) == (64, ("sglang's benchmark ended with 3",))


def test_a_benchmark_that_breaks_says_why(site: Site) -> None:
    """An exception inside it reaches the person who asked."""
    site.benchmark("sglang.bench_serving", last_line="raise RuntimeError('CUDA graph capture failed')")
    with GenerateServer(lambda _, asked: asked) as server:
        (problem,) = site.run(server).problems
    assert "RuntimeError: CUDA graph capture failed" in problem


def test_without_sglang_the_missing_module_is_named(site: Site) -> None:
    """The interpreter that was asked has no sglang."""
    with GenerateServer(lambda _, asked: asked) as server:
        (problem,) = site.run(server).problems
    assert "No module named" in problem
    assert "sglang" in problem
    assert server.requests == []
