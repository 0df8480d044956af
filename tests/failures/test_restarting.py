"""The write went well and the server does not: a gate that fails brings the bytes from before and the server back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.bed import Bed

CUDA_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def assert_as_before(bed: Bed) -> None:
    """The bytes are the original, one server runs and answers, and the ledger says what happened."""
    assert bed.is_original()
    assert bed.launchers() == 1
    assert bed.serves()


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"never_listens": True}, ("port: not reached within 3 s",)),
        ({"beacon_hash": "0" * 64}, ("runs patch 000000000000; expected ",)),
    ],
    ids=["never-ready", "runs-other-code"],
)
def test_a_gate_that_fails_rolls_back_and_says_why(
    serving: Bed, faults: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Exit 6 with the gate and what the log says; the server runs as before; the history shows both."""
    serving.fake.behave(patched=faults)
    answer = serving.apply("--ready-timeout", "3")
    assert answer.code == 6, answer
    assert "the server failed its gates: " in answer.stderr
    assert "try:" in answer.stderr
    for word in (*words, "rolled back, the bytes from before are back"):
        assert word in answer.stderr
    assert_as_before(serving)
    assert serving.revisions() == [("apply", "rolled-back"), ("rollback", "applied")]


def test_a_server_that_comes_up_neither_way_is_left_to_a_person_with_what_to_do(serving: Bed) -> None:
    """Exit 11: the bytes are back, and it is the server that does not start; the next restart starts it again."""
    serving.fake.behave(dies=True, start_s=1.2, die_log=CUDA_OOM)
    answer = serving.apply()
    assert answer.code == 11, answer
    assert "the bytes from before are back, but the server does not become ready with them either" in answer.stderr
    assert "out of memory" in answer.stderr
    assert "try:" in answer.stderr
    assert serving.is_original()
    serving.fake.behave(dies=False, start_s=0.0)
    assert serving.restart().code == 0
    assert_as_before(serving)


def test_a_rollback_whose_server_does_not_come_up_says_that_the_bytes_are_back(serving: Bed) -> None:
    """Exit 11 as well: there is nothing left to undo, and a restart starts it once the cause is mended."""
    assert serving.apply("--no-restart").code == 0
    serving.fake.behave(dies=True, start_s=1.2)
    answer = serving.rollback()
    assert answer.code == 11
    assert "the bytes are back" in answer.stderr
    assert serving.is_original()
    serving.fake.behave(dies=False, start_s=0.0)
    answer = serving.restart()
    assert answer.code == 0, answer
    assert "started: " in answer.stdout
    assert_as_before(serving)


def test_a_restart_that_does_not_get_ready_says_so_and_changes_no_file(serving: Bed) -> None:
    """Exit 6: nothing was written, so nothing is rolled back."""
    before = serving.files()
    serving.fake.behave(never_listens=True)
    answer = serving.restart("--ready-timeout", "2")
    assert answer.code == 6
    assert "did not pass its gates: port: not reached within 2 s" in answer.stderr
    assert serving.files() == before
    assert serving.launchers() == 1


def test_ctrl_c_while_waiting_for_the_server_puts_everything_back(serving: Bed) -> None:
    """Exit 130: the patched server that was still loading is replaced by the one from before."""
    serving.fake.behave(patched={"start_s": 60.0})
    answer = serving.apply("--ready-timeout", "60", interrupt_when=["Waiting until it is ready"])
    assert answer.code == 130, answer
    assert "interrupted: putting everything back" in answer.stderr
    assert "restored and read back" in answer.stderr
    assert_as_before(serving)
    assert serving.revisions() == [("apply", "rolled-back"), ("rollback", "applied")]
