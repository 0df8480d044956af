"""The releases at the edges of sglang's families, asked all that `make matrix` asks of every release."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from surgeon.surgery import EXPERTS, FORWARD, graft
from surgeon.surgery.recipes import recipes_of
from tests.matrix import checks
from tests.matrix.checks import HANDS_ON, check, spec_of
from tests.support.wheels import member

pytestmark = pytest.mark.wheels

EDGES = (
    *("0.4.6", "0.4.9", "0.4.10", "0.5.1", "0.5.2", "0.5.5", "0.5.6", "0.5.9", "0.5.10", "0.5.11", "0.5.13", "0.5.17"),
    *("0.5.20", "0.5.21", "0.5.23"),
)


@pytest.mark.parametrize("release", EDGES)
def test_both_places_are_found_grafted_and_taken_out_again(release: str) -> None:
    """And the witnesses, who know nothing of the locator, agree that the site is right."""
    result = check(release, seeds=100)
    assert result.problems == ()
    assert result.experts is not None
    assert result.forward is not None


def test_every_recipe_says_the_releases_that_it_was_seen_in() -> None:
    """The ranges that refusals show are those that the witness knows, without a gap."""
    last = "0.5.23"
    for recipe, (first, callee) in zip(recipes_of(EXPERTS), HANDS_ON, strict=True):
        assert recipe.releases == f"{first} to {last}"
        assert callee in recipe.anchor
        last = {"0.5.10": "0.5.9", "0.4.6.post5": "0.4.6.post4", "0.4.6": ""}[str(first)]


def test_a_call_behind_its_anchor_is_seen_by_the_witnesses() -> None:
    """They would notice: both the one that reads the file and the one that runs the function."""
    right = graft(member("0.5.9"), spec_of(EXPERTS))
    lines = right.result.split(b"\n")
    call = right.inserted[1]
    block, anchor = lines[call.start - 1 : call.stop - 1], lines[call.stop - 1 : call.stop]
    moved = b"\n".join([*lines[: call.start - 1], *anchor, *block, *lines[call.stop :]])
    assert list(checks._anchor("0.5.9", right)) == []
    assert list(checks._anchor("0.5.9", replace(right, result=moved)))
    assert "the call is passed by" in checks._runs(replace(right, result=moved), 40)[1]


def test_an_announcement_that_comes_late_is_seen_by_the_witness() -> None:
    """The batch must be known before anything is done with it."""
    right = graft(member("0.5.9", f"sglang/{FORWARD.file}"), spec_of(FORWARD))
    late = right.result.replace(
        b"        if _surgeon_oea.active:", b"        forward_batch.batch_size\n        if _surgeon_oea.active:"
    )
    assert list(checks._entry(right)) == []
    assert list(checks._entry(replace(right, result=late)))


@pytest.mark.parametrize(
    ("release", "code", "last"),
    [("0.5.9", 0, "1 releases, 1 found, 0 wrong"), ("0.0.1", 1, "1 releases, 0 found, 1 wrong")],
)
def test_the_script_tells_by_its_exit_code_whether_all_is_well(release: str, code: int, last: str) -> None:
    """A release that cannot be had is wrong too."""
    script = Path(checks.__file__).with_name("run.py")
    command = [sys.executable, str(script), release, "--no-imports", "--seeds", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done
    assert done.stdout.splitlines()[-1].startswith(last)
