"""The verdict names the function that really ran: an outside trace of the running server says which one it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.lab import lifecycle, server
from surgeon.lab.loopback import generate
from surgeon.surgery.calltree import leaf_words
from tests.support import leaf_trace
from tests.support.command import surgeon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A server starts for each release; it is the one that the lab would start anyway, with a profiler beside it.
pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], lifecycle.Description]]:
    """Bring up a lab whose server is watched from outside, and take it down again."""
    shutil.copy(Path(leaf_trace.__file__), tmp_path / "sitecustomize.py")
    plain = server._variables
    watched = {"PYTHONPATH": str(tmp_path), "SURGEON_TEST_TRACE": str(tmp_path / "trace")}
    monkeypatch.setattr(server, "_variables", lambda ranks: plain(ranks) | watched)
    yield lambda release: lifecycle.up(lifecycle.Wanted(sglang=release), fresh=True).description
    lifecycle.down()


def seen(trace: Path) -> list[dict[str, Any]]:
    """What the trace says: who called `select_experts`, what was entered in it, and where the top-k was taken."""
    return [json.loads(line) for line in trace.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("release", ["0.5.9", "0.5.23"])
def test_the_leaf_that_is_named_is_the_one_that_ran(
    release: str, traced: Callable[[str], lifecycle.Description], tmp_path: Path
) -> None:
    """In every pass, the top-k was taken in the function that inspect names, on the way that it marks."""
    lab = traced(release)
    assert generate(lab.port, 1, max_new_tokens=4)[0].tokens == 4
    passes = seen(tmp_path / "trace")
    ran = {name for one in passes for name in one["leaves"]}
    callers = {one["caller"] for one in passes}
    result = surgeon("inspect", "topk", "--host", "lab", "--json").result
    assert result["live_path"]["verdict"] == "reached"
    assert len(ran) == 1
    assert ran <= leaf_words(result["live_path"]["leaf"])
    marked = {one["name"] for one in result["functions"] if one["on_live_path"]}
    assert ran <= marked
    assert marked & {one["name"] for one in result["functions"] if one["name"].startswith("TopK.")} <= callers
    for one in passes:
        assert {name for name in marked if "." not in name} <= {"select_experts", *one["entered"]}
