"""The arithmetic on what the recorder saw."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean

import pytest

from surgeon.errors import SurgeonError
from surgeon.lab import recorder
from surgeon.lab.recorder import Pass


def test_the_expected_union_is_what_drawing_experts_gives() -> None:
    """The formula agrees with 4000 draws of 16 tokens that choose 8 of 64 experts each."""
    numbers = random.Random(1)  # noqa: S311 - experts, not secrets
    drawn = fmean(len({e for _ in range(16) for e in numbers.sample(range(64), 8)}) for _ in range(4000))
    assert recorder.expected_active(64, 8, 16) == pytest.approx(drawn, abs=0.15)


@pytest.mark.parametrize(("rows", "expected"), [(0, 0.0), (1, 8.0)])
def test_no_token_needs_no_expert_and_one_needs_k(rows: int, expected: float) -> None:
    """The two batches that need no probability."""
    assert recorder.expected_active(64, 8, rows) == pytest.approx(expected)


def seen(pass_id: int, rows: int, *layers: tuple[int, ...]) -> Pass:
    """A pass of a model whose routed layers begin at 1."""
    return Pass(pass_id, rank=0, rows=rows, layers=tuple(range(1, len(layers) + 1)), counts=layers)


def test_active_experts_are_those_with_a_token() -> None:
    """An expert counts once however many tokens it got."""
    assert seen(1, 2, (2, 1, 0, 1), (0, 0, 4, 0)).active == (3, 1)


def test_the_mean_is_over_layers_and_passes_of_one_size() -> None:
    """Prefill passes, of other sizes, are left out."""
    passes = [seen(1, 2, (1, 1, 0, 0), (2, 0, 0, 0)), seen(2, 2, (1, 1, 1, 1), (0, 1, 1, 1)), seen(3, 9, (9, 0, 0, 0))]
    assert recorder.mean_active(passes, rows=2) == pytest.approx((2 + 1 + 4 + 3) / 4)


def test_a_size_that_was_never_seen_is_an_error_that_names_those_that_were() -> None:
    """No mean is made up of nothing."""
    with pytest.raises(SurgeonError, match=r"No recorded pass has 16 rows; found \[2, 9\]"):
        recorder.mean_active([seen(1, 9, (9,)), seen(2, 2, (2,))], rows=16)


def test_a_recording_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """An interpreter without torch, or a file that is none, gives the reason and whose it is."""
    bare = Path("/usr/bin/env")
    with pytest.raises(SurgeonError, match="could not be read") as refused:
        recorder.read([tmp_path / "absent.pt"], python=bare, top_k=8)
    assert refused.value.where == str(bare)
