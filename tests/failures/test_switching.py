"""Settings of a server that runs: changed in every rank at once or in none, and never while a request runs."""

from __future__ import annotations

import contextlib
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.node.agent.state import site_id
from tests.support.bed import make_bed, runner
from tests.support.local_node import local_node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.bed import Bed

pytestmark = pytest.mark.wheels


@contextlib.contextmanager
def patched(root: Path) -> Iterator[Bed]:
    """A server of two ranks that runs the patch with k0 = 4, proved by both."""
    with make_bed(root, options=("--tp", "2")) as bed:
        bed.fake.start()
        answer = bed.apply("--k0", "4")
        assert answer.code == 0, answer
        yield bed


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """One such server for all tests that leave it running with settings that every rank has in force."""
    with patched(tmp_path_factory.mktemp("shared") / "bed") as bed:
        yield bed


@pytest.fixture
def live(shared: Bed) -> Iterator[Bed]:
    """The shared server with nothing wrong, before and after."""
    shared.configure(node_python=None)
    yield shared
    shared.fake.behave(**WELL)


WELL: dict[str, Any] = {
    "deaf_ranks": (),
    "refusing_ranks": {},
    "stubborn_ranks": (),
    "skewed_ranks": (),
    "refuses_to_generate": False,
    "requests": 0,
    "passes_a_second": 0,
    "loads": "/v1/loads",
}


def change(bed: Bed, *words: str, **options: Any) -> Any:
    """Run ``surgeon set oea WORDS --yes``, waiting at most two seconds for requests to end."""
    return bed.surgeon("set", "oea", "--yes", "--wait", "2", *words, **options)


def in_force(bed: Bed) -> list[tuple[int, bool]]:
    """k0, on or off, as each living rank reports them from inside its process."""
    told = [json.loads(path.read_text("utf-8")) for path in (bed.ssh.state_dir / "beacons").glob("*.json")]
    own = sorted((one for one in told if one["pid"] in bed.fake.pids()), key=lambda one: one["rank"])
    return [(one["settings"]["k0"], one["settings"]["enabled"]) for one in own]


def another(bed: Bed) -> int:
    """A k0 that is not the one in the file."""
    return 5 if json.loads(file(bed))["k0"] != 5 else 4


def file(bed: Bed) -> bytes:
    """The settings file."""
    return (bed.moe / "_surgeon_oea.json").read_bytes()


def facts(bed: Bed) -> dict[str, Any]:
    """What a change that failed or was refused must leave as it was: files, server, settings in force."""
    return {**bed.facts(), "ledgers": None, "in_force": in_force(bed)}


def test_settings_change_and_change_back_in_every_rank_without_a_restart(tmp_path: Path) -> None:
    """k0, off and on again in the same processes, a revision of kind set each; and a rollback to any of them."""
    with patched(tmp_path / "bed") as bed:
        pids, first = sorted(bed.fake.pids()), file(bed)
        answer = change(bed, "--k0", "5", "--json")
        assert answer.code == 0, answer
        assert (answer.result["status"], answer.result["before"]["k0"]) == ("set", 4)
        assert [gate["name"] for gate in answer.result["gates"]] == ["armed", "in-force"]
        status = bed.status()
        assert [r["beacon"]["settings"]["k0"] for r in status["ranks"]] == [5, 5]
        passes = {r["beacon"]["in_force"]["from_pass"] for r in status["ranks"]}
        assert passes == {answer.result["from_pass"]}
        second = file(bed)
        assert json.loads(second)["k0"] == 5
        assert change(bed, "--off").code == 0
        assert in_force(bed) == [(5, False)] * 2
        assert change(bed, "--on", "--schedule", "1-2:8,3-4:6,5-64:4").code == 0
        status = bed.status()
        assert status["in_force"]["k0_schedule"] == [[1, 2, 8], [3, 4, 6], [5, 64, 4]]
        assert (status["differs"], status["state"]["state"]) == ("", "live")
        assert sorted(bed.fake.pids()) == pids
        assert bed.revisions() == [("apply", "applied")] + [("set", "applied")] * 3
        assert bed.rollback("2").code == 0
        assert file(bed) == second
        assert bed.rollback("1", "--no-restart").code == 0
        assert file(bed) == first
        assert "k0 = 4" in bed.status()["differs"]
        assert bed.rollback("--no-restart").code == 0
        assert bed.is_original()


def test_what_is_in_force_already_is_left_alone_and_a_plan_changes_nothing(live: Bed) -> None:
    """No new revision for the same k0; ``--json`` without ``--yes`` and ``--dry-run`` only plan."""
    before, other = live.facts(), another(live)
    answer = change(live, "--k0", str(json.loads(file(live))["k0"]))
    assert (answer.code, "already in force in every rank: k0 = " in answer.stdout) == (0, True)
    answer = live.surgeon("set", "oea", "--k0", str(other), "--json")
    assert (answer.code, answer.result["status"]) == (0, "planned")
    assert live.surgeon("set", "oea", "--k0", str(other), "--dry-run", "--exit-code").code == 10
    answer = live.surgeon("set", "oea", "--k0", str(other))
    assert (answer.code, "no terminal to ask on" in answer.stderr) == (0, True)
    assert live.facts() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--k0", "9"), "k0 is 9; expected 1..8"),
        (("--schedule", "3-4:9"), "k0 is 9; expected 1..8"),
        (("--schedule", "3-4"), "'3-4' is no part of a schedule"),
        (("--schedule", "5-8:4,3-4:6"), "expected ranges"),
        (("--min-rows", "65"), "min_rows is 65; expected at most max_rows, 64"),
        (("--k0", "5", "--schedule", "3-4:6"), "not both"),
        ((), "nothing was said that could be changed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(live: Bed, words: tuple[str, ...], said: str) -> None:
    """Exit 2, and nothing is touched."""
    before = live.facts()
    answer = change(live, *words)
    assert answer.code == 2, answer
    assert said in answer.stderr
    assert live.facts() == before


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"deaf_ranks": (1,)}, "scheduler_TP1 (pid {}) has not read the new settings within 5 s"),
        ({"refusing_ranks": {"1": "k0: too odd"}}, "scheduler_TP1 (pid {}) refused the settings: k0: too odd"),
        ({"stubborn_ranks": (1,)}, "scheduler_TP1 (pid {}) has not taken the settings into force"),
        ({"skewed_ranks": (1,)}, "the ranks changed at different passes"),
        ({"refuses_to_generate": True}, "the server does not answer a generation: status 500"),
    ],
    ids=["never-arms", "refuses", "never-in-force", "another-pass", "no-generation"],
)
def test_a_change_that_not_every_rank_makes_is_made_by_none(live: Bed, fault: dict[str, Any], said: str) -> None:
    """Exit 6 with which rank and why; what was in force is so in both, by the file too, and the ledger tells."""
    before, was = in_force(live), json.loads(file(live))
    live.fake.behave(**fault)
    answer = change(live, "--k0", str(another(live)))
    assert answer.code == 6, answer
    assert said.format(live.fake.pid_of("sglang::scheduler_TP1")) in answer.stderr
    assert "the settings from before are back" in answer.stderr
    assert in_force(live) == before
    assert json.loads(file(live))["k0"] == was["k0"]
    kinds = live.revisions()
    assert ("set", "rolled-back") in kinds
    assert kinds[-1] == ("rollback", "applied")
    assert "pending" not in {status for _, status in kinds}


def test_a_server_that_dies_leaves_the_settings_from_before_in_the_file(tmp_path: Path) -> None:
    """Exit 6: it ended while ranks armed; whoever starts it again gets k0 = 4."""
    with patched(tmp_path / "bed") as bed:
        before = file(bed)
        bed.fake.behave(dies_armed=True)
        answer = change(bed, "--k0", "5")
        assert answer.code == 6, answer
        assert "ended" in answer.stderr
        assert file(bed) == before
        assert bed.revisions() == [("apply", "applied"), ("set", "rolled-back"), ("rollback", "applied")]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"requests": 3}, "after 2 s 3 are running or waiting"),
        ({"requests": 3, "loads": "/get_load"}, "after 2 s 3 are running or waiting"),
        ({"loads": None, "passes_a_second": 20}, "after 2 s passes are still being made"),
    ],
    ids=["v1-loads", "get-load", "by-passes"],
)
def test_a_server_that_is_never_quiet_is_left_alone(live: Bed, fault: dict[str, Any], said: str) -> None:
    """Exit 4 after the wait, on releases that tell their load and on those that do not; nothing was written."""
    before = facts(live)
    live.fake.behave(**fault)
    answer = change(live, "--k0", str(another(live)))
    assert answer.code == 4, answer
    assert said in answer.stderr
    assert "--wait" in answer.stderr
    assert facts(live) == before


def test_requests_are_waited_for(live: Bed) -> None:
    """The change is made as soon as the last one has ended."""
    before, other = in_force(live), another(live)
    live.fake.behave(requests=1)
    with live.beginning("set", "oea", "--k0", str(other), "--on", "--yes", "--wait", "30") as running:
        running.said("Waiting until no request runs")
        assert in_force(live) == before
        live.fake.behave(requests=0)
    assert running.answer.code == 0, running.answer
    assert in_force(live) == [(other, True)] * 2


@pytest.mark.parametrize(
    ("verb", "moment"), [("commit", "first-rename"), ("watch", "start"), ("http", "start"), ("finish", "start")]
)
def test_ctrl_c_puts_the_settings_from_before_back(live: Bed, verb: str, moment: str) -> None:
    """Exit 130, wherever it comes; before anything was written it leaves no trace."""
    before, was = in_force(live), json.loads(file(live))["k0"]
    live.break_at(verb, moment, do=["interrupt-client", "wait"], wait_s=1.0)
    answer = change(live, "--k0", str(another(live)))
    assert live.broke
    assert answer.code == 130, answer
    live.await_agents()
    assert "pending" not in {status for _, status in live.revisions()}
    assert in_force(live) == before
    assert json.loads(file(live))["k0"] == was


def test_a_change_that_was_cut_short_is_settled_by_the_next_one(live: Bed) -> None:
    """Killed before the last word to the ledger: the next `set` closes it, without a restart, and makes its own."""
    pids, other = sorted(live.fake.pids()), another(live)
    live.break_at("finish", do=["kill-client", "die"])
    assert change(live, "--k0", str(other)).code == -signal.SIGKILL
    assert live.revisions()[-1] == ("set", "pending")
    answer = change(live, "--k0", "6")
    assert answer.code == 0, answer
    assert "had been cut short; finished: every worker proves it" in answer.stderr
    assert {k0 for k0, _ in in_force(live)} == {6}
    assert sorted(live.fake.pids()) == pids


def test_anothers_lease_keeps_a_change_out(live: Bed) -> None:
    """Exit 7 with whose it is."""
    before = facts(live)
    with local_node(live.ssh.state_dir) as node:
        site = {"site_id": site_id(str(live.fake.site))}
        holder = {"owner": "ann", "host": "laptop-of-ann", "pid": 4711, "ttl_s": 120}
        node.lease = node.call("lease", {**site, "action": "acquire", **holder})["token"]
        answer = change(live, "--k0", str(another(live)))
        node.call("lease", {**site, "action": "release"})
    assert answer.code == 7
    assert "locked by ann on laptop-of-ann (pid 4711)" in answer.stderr
    assert facts(live) == before


def test_a_server_that_does_not_run_the_patch_is_told_what_to_do(bed: Bed) -> None:
    """No server, no patch, written after the server was started, and a release where passes are not announced."""
    answer = change(bed, "--k0", "5")
    assert (answer.code, "no sglang server" in answer.stderr) == (4, True)
    bed.fake.start()
    answer = change(bed, "--k0", "5")
    assert (answer.code, "is not live here: pristine" in answer.stderr) == (4, True)
    assert bed.apply("--no-restart").code == 0
    answer = change(bed, "--k0", "5")
    assert answer.code == 4, answer
    assert "has written no beacon; the server may have been started before the patch was written" in answer.stderr
    assert "surgeon restart" in answer.stderr


def test_without_the_second_graft_a_change_needs_a_restart_and_every_report_says_so(tmp_path: Path) -> None:
    """A model_runner.py that offers no place: applied all the same, by row count, and `set` names the way."""
    other = runner().replace(b"class ModelRunner", b"class AnotherRunner")
    with make_bed(tmp_path / "bed", other=other) as bed:
        bed.fake.start()
        found = bed.surgeon("inspect", "topk", "--json").result
        assert found["gate"]["by"] == "row-count"
        assert "ModelRunner" in found["gate"]["why"]
        answer = bed.apply("--k0", "4", "--json")
        assert answer.code == 0, answer
        assert answer.result["gate"] == found["gate"]
        assert any("row count only" in text for text in answer.result["warnings"])
        assert bed.fake.runner.read_bytes() == other
        assert bed.status()["gate"] == found["gate"]
        answer = change(bed, "--k0", "5")
        assert answer.code == 4, answer
        assert "cannot change its settings while it runs: it is told of no forward passes" in answer.stderr
        assert "surgeon apply oea" in answer.stderr
