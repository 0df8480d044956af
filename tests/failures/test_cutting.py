"""The connection is cut, surgeon is killed, or Ctrl-C comes at the worst moment: whole afterwards, and settled next.

Each moment is hit exactly: the interpreter that runs the agent on the node strikes when the agent gets there
(``Bed.break_at``). What the agent does once nobody listens is the agent's own.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.bed import Bed

PENDING = "the next apply, rollback or restart finishes or undoes it"
UNDONE = "revision 1 had been cut short; undone, the bytes from before are back"


def assert_as_before(bed: Bed) -> None:
    """Byte for byte as installed, and one server that answers."""
    bed.await_agents()
    assert bed.is_original()
    assert bed.launchers() == 1
    assert bed.serves()


@pytest.mark.parametrize(
    ("verb", "moment", "do"),
    [
        ("commit", "first-rename", ["cut"]),
        ("restart", "start", ["cut", "die"]),
        ("watch", "start", ["cut", "die"]),
    ],
    ids=["between-stage-and-rename", "between-rename-and-restart", "while-it-starts"],
)
def test_a_cut_connection_leaves_a_whole_node_and_the_next_command_settles_it(
    serving: Bed, verb: str, moment: str, do: Sequence[str]
) -> None:
    """Exit 3 with what is pending; the rollback after it says what became of it and ends with identical bytes."""
    serving.break_at(verb, moment, do=do)
    answer = serving.apply()
    assert serving.broke
    assert answer.code == 3, answer
    assert "was cut before the answer came" in answer.stderr
    assert f"pending; {PENDING}" in answer.stderr
    serving.await_agents()
    assert serving.is_patched(), "an agent that has begun to put files in place goes on to the last"
    assert serving.launchers() == 1
    assert f"revision 1 (apply) was begun and never closed; {PENDING}" in serving.status()["unfinished"]
    answer = serving.rollback()
    assert answer.code == 0, answer
    assert UNDONE in answer.stderr
    assert "nothing to roll back" in answer.stdout
    assert_as_before(serving)


def test_a_server_that_was_left_down_is_said_to_be_down_and_started_by_the_next_command(serving: Bed) -> None:
    """Cut between stop and start, and the agent died with the connection."""
    serving.break_at("restart", "spawn", do=["cut", "die"])
    answer = serving.apply()
    assert serving.broke
    assert answer.code == 3
    assert serving.launchers() == 0
    assert serving.is_patched()
    assert "is not running; " + PENDING in serving.status()["unfinished"]
    answer = serving.restart()
    assert answer.code == 0, answer
    assert UNDONE in answer.stderr
    assert "started: " in answer.stdout
    assert_as_before(serving)


def test_a_revision_that_had_passed_every_gate_is_finished_not_undone(serving: Bed) -> None:
    """Cut before the last word to the ledger: every worker proves the patch, so the next apply has nothing to do."""
    serving.break_at("finish", do=["cut", "die"])
    answer = serving.apply()
    assert serving.broke
    assert answer.code == 3
    pids = sorted(serving.fake.pids())
    answer = serving.apply()
    assert answer.code == 0, answer
    assert "revision 1 had been cut short; finished: every worker proves it" in answer.stderr
    assert "already applied: revision 1" in answer.stdout
    assert sorted(serving.fake.pids()) == pids
    assert serving.revisions() == [("apply", "applied")]


def test_a_killed_surgeon_whose_commit_still_runs_is_waited_for_and_undone(serving: Bed) -> None:
    """The next apply looks before the files are in place and acts after: what it saw first must not count."""
    serving.break_at("commit", "first-rename", do=["kill-client", "wait"], wait_s=2.0)
    answer = serving.apply()
    assert answer.code == -signal.SIGKILL
    assert serving.fake.topk.read_bytes() == serving.original
    answer = serving.apply()
    assert answer.code == 0, answer
    assert UNDONE in answer.stderr
    assert "runs in every worker; revision 3" in answer.stdout
    assert serving.revisions() == [("apply", "rolled-back"), ("rollback", "applied"), ("apply", "applied")]
    assert serving.rollback().code == 0
    assert_as_before(serving)


def test_a_killed_surgeon_whose_restart_still_runs_is_waited_for(serving: Bed) -> None:
    """The next command comes between stop and start: no second server, no false alarm."""
    serving.break_at("restart", "spawn", do=["kill-client", "wait"], wait_s=2.0)
    answer = serving.apply()
    assert answer.code == -signal.SIGKILL
    assert serving.launchers() == 0
    answer = serving.rollback()
    assert answer.code == 0, answer
    assert UNDONE in answer.stderr
    assert_as_before(serving)


@pytest.mark.parametrize(
    ("verb", "moment"),
    [("commit", "first-rename"), ("restart", "spawn")],
    ids=["staged", "stopped"],
)
def test_ctrl_c_puts_everything_back(serving: Bed, verb: str, moment: str) -> None:
    """Exit 130, wherever it comes: the agent is waited for, its work undone, and the server runs as before."""
    serving.break_at(verb, moment, do=["interrupt-client", "wait"], wait_s=1.5)
    answer = serving.apply()
    assert serving.broke
    assert answer.code == 130, answer
    assert "interrupted: putting everything back" in answer.stderr
    assert "revision 1 is rolled back: everything is as it was before" in answer.stderr
    assert serving.revisions() == [("apply", "rolled-back"), ("rollback", "applied")]
    assert_as_before(serving)


def test_ctrl_c_before_anything_is_written_leaves_no_trace(serving: Bed) -> None:
    """There is nothing to put back."""
    before = serving.facts()
    answer = serving.apply(interrupt_when=["Building the model's config"])
    assert answer.code == 130
    serving.await_agents()
    assert serving.facts() == before


def test_ctrl_c_that_comes_too_late_for_a_write_alone_says_so(bed: Bed) -> None:
    """With no server to restart, the write is the last step: the agent closes it although nobody listens."""
    bed.break_at("commit", "first-rename", do=["interrupt-client", "wait"], wait_s=1.0)
    answer = bed.apply()
    assert bed.broke
    assert answer.code == 130, answer
    assert "too late to stop the write, which is done and closed; `surgeon rollback` takes it back" in answer.stderr
    assert bed.is_patched()
    assert bed.rollback().code == 0
    assert bed.is_original()


def test_a_second_ctrl_c_leaves_the_rest_to_the_next_command(serving: Bed) -> None:
    """Whoever cannot wait gets the terminal back, and is told what is left."""
    serving.fake.behave(patched={"start_s": 60.0})
    moments = ["Waiting until it is ready", "interrupted: putting everything back"]
    answer = serving.apply("--ready-timeout", "60", interrupt_when=moments)
    assert answer.code == 130, answer
    assert f"left as it is: revision 1 is pending; {PENDING}" in answer.stderr
    serving.await_agents()
    assert serving.is_original() or serving.is_patched()
    answer = serving.rollback()
    assert answer.code == 0, answer
    assert_as_before(serving)


def test_a_rollback_that_is_cut_is_finished_by_the_next_command(serving: Bed) -> None:
    """Its bytes are back, and the server was not restarted yet: the next rollback does that and says so."""
    assert serving.apply("--no-restart").code == 0
    serving.break_at("restore", "first-rename", do=["cut"])
    answer = serving.rollback()
    assert serving.broke
    assert answer.code == 3
    assert "the rollback may be pending; the next apply, rollback or restart finishes it" in answer.stderr
    serving.await_agents()
    assert serving.is_original()
    answer = serving.rollback()
    assert answer.code == 0, answer
    assert "revision 2, a rollback, had been cut short; finished" in answer.stderr
    assert_as_before(serving)


def test_ctrl_c_during_a_restart_lets_the_node_finish_it(serving: Bed) -> None:
    """Nothing was written, so nothing is undone; the agent goes on and the server comes back."""
    serving.break_at("restart", "spawn", do=["interrupt-client", "wait"])
    answer = serving.restart()
    assert serving.broke
    assert answer.code == 130
    assert "the node goes on with the restart by itself" in answer.stderr
    serving.await_agents()
    serving.fake.wait_listening()
    assert_as_before(serving)
