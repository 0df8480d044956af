"""What a command writes and how it ends: one JSON object, exit codes by kind of error, terminals and encodings."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Annotated

import pytest
import typer

from surgeon import errors
from surgeon.cli import output
from surgeon.cli.group import SurgeonGroup
from surgeon.errors import SurgeonError
from tests.support.cli import Ran, command, process, surgeon, terminal

if TYPE_CHECKING:
    from pathlib import Path

ADVICE = "do this next"


def kinds() -> list[type[SurgeonError]]:
    """The kinds of error that errors.py has: the root and everything below it."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SurgeonError)]


def failing(error: BaseException, *, after_answer: bool = False) -> typer.Typer:
    """A command line with surgeon's own group and sink, whose one command raises."""
    application = typer.Typer(cls=SurgeonGroup, pretty_exceptions_enable=False)

    @application.callback()
    def root() -> None:
        pass

    @application.command("fail")
    def fail(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:  # noqa: FBT002 - it is an option
        sink = output.use(output.Sink("fail", as_json=as_json))
        if after_answer:
            sink.answer({"status": "planned"}, lambda: ["planned"])
        raise error

    return application


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_an_error_ends_with_its_code_and_says_what_to_do(kind: type[SurgeonError]) -> None:
    """For people: message and advice on standard error, nothing on standard output."""
    error = kind("expected [this], found [that]", advice=ADVICE)
    ran = surgeon("fail", application=failing(error))
    assert ran == Ran(kind.exit_code, "", f"error: expected [this], found [that]\ntry:   {ADVICE}\n")


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_an_error_is_one_object_under_json(kind: type[SurgeonError]) -> None:
    """For programs: the same code, and one object that carries the error's stable word."""
    ran = surgeon("fail", "--json", application=failing(kind("message", advice=ADVICE, where="/there")))
    assert ran.code == kind.exit_code
    problem = {"code": kind.code, "message": "message", "advice": ADVICE, "where": "/there"}
    assert ran.json() == {"schema": "surgeon/fail/1", "ok": False, "result": {}, "problems": [problem]}
    assert ran.stderr == ""


def test_an_error_after_the_answer_adds_no_second_object() -> None:
    """`--dry-run --exit-code` answers and then ends with 10: standard output stays one object."""
    ran = surgeon("fail", "--json", application=failing(SurgeonError("pending"), after_answer=True))
    assert ran.json()["result"] == {"status": "planned"}
    assert "pending" in ran.stderr


def test_a_bug_has_its_object_too_and_its_traceback_on_standard_error() -> None:
    """An exception that nobody raised on purpose: exit 1, an object for programs, the traceback for the report."""
    application = failing(ZeroDivisionError("division by zero"))
    ran = surgeon("fail", "--json", application=application)
    assert ran.code == 1
    (problem,) = ran.json()["problems"]
    assert (problem["code"], problem["message"]) == ("failed", "unexpected ZeroDivisionError: division by zero")
    assert surgeon("fail", application=application).stdout == ""


@pytest.mark.parametrize(
    ("line", "schema", "words"),
    [
        (["inspect", "topk", "--json", "--bogus"], "surgeon/inspect-topk/1", "--bogus"),
        (["apply", "oea", "--k0", "four", "--json"], "surgeon/apply-oea/1", "--k0"),
        (["bench", "smoke", "--json", "--prompts", "0"], "surgeon/bench-smoke/1", "--prompts"),
        (["lab", "up", "--json", "--bogus"], "surgeon/lab-up/1", "--bogus"),
        (["nonsense", "--json"], "surgeon/surgeon/1", "nonsense"),
        (["inspect", "topk", "--json"], "surgeon/inspect-topk/1", "--host"),
        (["inspect", "topk", "--json", "--profile", "x", "--host", "h"], "surgeon/inspect-topk/1", "'x'"),
        (["apply", "oea", "--json", "--k0", "65"], "surgeon/apply-oea/1", "64"),
        (["apply", "oea", "--json", "--refill", "some"], "surgeon/apply-oea/1", "native or strict"),
    ],
)
def test_a_mistake_in_the_line_is_exit_2_and_one_object(line: list[str], schema: str, words: str) -> None:
    """Whoever finds it, the parser or surgeon: usage."""
    ran = surgeon(*line)
    body = ran.json()
    assert (ran.code, body["schema"], body["ok"]) == (2, schema, False)
    assert body["problems"][0]["code"] == "usage"
    assert words in body["problems"][0]["message"]


def test_a_mistake_in_the_line_is_told_to_people_on_standard_error() -> None:
    """Without --json, in words, with standard output left alone."""
    ran = surgeon("inspect", "topk", "--bogus")
    assert (ran.code, ran.stdout) == (2, "")
    assert "--bogus" in ran.stderr


def test_a_site_that_is_not_there_is_exit_2_with_words(tmp_path: Path) -> None:
    """The refusal names the folder, what was expected there, and how to get it."""
    ran = surgeon("inspect", "topk", "--site", tmp_path / "gone")
    assert (ran.code, ran.stdout) == (2, "")
    for words in (str(tmp_path / "gone"), "sglang", "python -m zipfile -e"):
        assert words in ran.stderr


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_applying_to_a_folder_needs_a_dry_run(tmp_path: Path, as_json: list[str]) -> None:
    """A folder has no server and no ledger: refused before it is looked at."""
    ran = surgeon("apply", "oea", "--site", tmp_path, *as_json)
    assert ran.code == 2
    assert "--dry-run" in (ran.json()["problems"][0]["message"] if as_json else ran.stderr)


@pytest.mark.wheels
def test_inspect_of_a_site_answers_in_json_with_the_site(site: Path) -> None:
    """The whole answer on standard output, nothing beside it."""
    ran = surgeon("inspect", "topk", "--site", site, "--json")
    body = ran.json()
    assert (ran.code, ran.stderr, body["schema"], body["ok"]) == (0, "", "surgeon/inspect-topk/1", True)
    source = (site / "sglang/srt/layers/moe/topk.py").read_text(encoding="utf-8").splitlines()
    found = body["result"]["site"]
    assert (body["result"]["version"], found["outcome"], found["function"]) == ("0.5.9", "found", "select_experts")
    assert source[found["line"] - 1].strip() == found["text"].strip()


@pytest.mark.wheels
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_a_dry_run_with_changes_is_exit_10_when_asked(site: Path, as_json: list[str]) -> None:
    """The plan on standard output, the exit code for scripts; without --exit-code it is 0. Nothing is written."""
    file = site / "sglang/srt/layers/moe/topk.py"
    before = file.read_bytes()
    line = ["apply", "oea", "--k0", "4", "--dry-run", "--site", str(site), *as_json]
    assert surgeon(*line).code == 0
    ran = surgeon(*line, "--exit-code")
    assert ran.code == 10
    plan = ran.json()["result"]["diff"] if as_json else ran.stdout
    assert "+    if _surgeon_oea.active:" in plan.splitlines()
    assert "changes to make" in ran.stderr
    assert file.read_bytes() == before


@pytest.mark.wheels
def test_a_diff_in_a_pipe_is_whole(site: Path) -> None:
    """Not cropped to a terminal's width that nobody has: the text is the diff that --json carries, line for line."""
    line = ["apply", "oea", "--dry-run", "--site", str(site)]
    diff = surgeon(*line, "--json").json()["result"]["diff"].splitlines()
    assert max(map(len, diff)) > 80
    assert surgeon(*line).stdout.splitlines() == diff


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk"])
def test_an_encoding_that_lacks_a_sign_ends_nothing(home: Path, encoding: str) -> None:
    """A path that standard output cannot spell is escaped for people; JSON stays JSON and says it exactly."""
    odd = home / "größe-✓"
    odd.mkdir()
    (odd / "surgeon.toml").write_text('host = "gpu1"\n', encoding="utf-8")
    environ = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    told = process("hosts", environ=environ, cwd=odd)
    assert (told.code, told.stderr) == (0, "")
    assert "gpu1" in told.stdout
    assert r"\u2713" in told.stdout
    assert process("hosts", "--json", environ=environ, cwd=odd).json()["result"]["file"] == f"{odd}/surgeon.toml"


def test_no_color_is_respected_on_a_terminal() -> None:
    """The same terminal, once with colours and once, by NO_COLOR, without."""
    colour = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7])[0-9;]*m")
    plain, coloured = (terminal("status", columns=100, environ=e) for e in ({"NO_COLOR": "1"}, {}))
    assert (plain.code, coloured.code) == (2, 2)
    assert colour.search(coloured.stdout)
    assert not colour.search(plain.stdout)
    assert "no node is named" in plain.stdout


def test_a_narrow_terminal_folds_and_loses_nothing(home: Path) -> None:
    """On 40 columns a long value goes on in the next line."""
    python = "/opt/environments/sglang-0.5.9/bin/python3.11"
    (home / "surgeon.toml").write_text(f'host = "gpu1"\npython = "{python}"\n', encoding="utf-8")
    table = re.sub(r"\x1b\[[0-9;]*m", "", terminal("hosts", columns=40).stdout).rpartition("\n/")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 40
    assert python in re.sub(r"\s+", "", table)


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_ctrl_c_ends_with_130_and_says_so(home: Path, as_json: list[str]) -> None:
    """While a node is asked that never answers; under --json there is an object even then."""
    asked = home / "asked"
    silent = home / "silent-python"
    silent.write_text(f"#!/bin/sh\ntouch {asked}\nexec sleep 20\n", encoding="utf-8")
    silent.chmod(0o700)
    child = subprocess.Popen(
        command("status", "--host", "local", *as_json),
        env={**os.environ, "SURGEON_NODE_PYTHON": str(silent)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 30
    while not asked.exists() and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=30)
    ran = Ran(child.returncode, stdout, stderr)
    assert ran.code == 130
    if as_json:
        assert [problem["code"] for problem in ran.json()["problems"]] == ["interrupted"]
    else:
        assert (ran.stdout, ran.stderr) == ("", "interrupted\n")


def test_a_question_without_a_terminal_is_answered_no(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing hangs and nothing is changed; the way to say yes is named."""
    assert output.Sink().confirm("Apply this?") is False
    assert "--yes" in capsys.readouterr().err


def test_what_may_bite_is_carried_by_json_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    """A warning goes to standard error at once, and into the object's problems."""
    sink = output.Sink("apply oea", as_json=True)
    sink.warn("the server keeps [old] code")
    sink.answer({"status": "applied"}, list)
    written = capsys.readouterr()
    assert "the server keeps [old] code" in written.err
    body = Ran(0, written.out, written.err).json()
    assert (body["schema"], body["ok"]) == ("surgeon/apply-oea/1", True)
    assert body["problems"][0]["message"] == "the server keeps [old] code"


def test_a_step_tells_how_it_ended_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Begun, done with what came of it, or failed: lines that stay, none of them on standard output."""
    sink = output.Sink()
    with sink.step("Writing [3] files") as step:
        step.done("read back")
    with pytest.raises(SurgeonError), sink.step("Restarting"):
        raise SurgeonError("no")
    written = capsys.readouterr()
    assert written.out == ""
    lines = [re.sub(r"[0-9.]+ s", "T", line) for line in written.err.splitlines()]
    assert lines == [
        "  Writing [3] files ...",
        "✓ Writing [3] files: read back (T)",
        "  Restarting ...",
        "✗ Restarting (T)",
    ]
