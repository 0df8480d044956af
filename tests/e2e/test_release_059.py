"""The same on sglang 0.5.9, whose topk.py is another file with another site."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from surgeon.lab import lifecycle
from surgeon.lab.loopback import generate
from tests.support.command import surgeon
from tests.support.witness import from_wheel, topk_file

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]


def test_inspect_apply_and_rollback_on_0_5_9(
    lab_up: Callable[[lifecycle.Wanted], lifecycle.Description],
) -> None:
    """The site before the recorder is found, every worker proves the patch, and the wheel's bytes return."""
    lab = lab_up(lifecycle.Wanted(sglang="0.5.9"))
    path = topk_file(lab)
    found = surgeon("inspect", "topk", "--host", "lab", "--json").result
    assert found["lines"] == 1099
    assert found["site"]["outcome"] == "found"
    assert "on_select_experts" in found["site"]["text"]
    applied = surgeon("apply", "oea", "--k0", "4", "--host", "lab", "--yes", "--json")
    assert applied.code == 0, applied.stdout + applied.stderr
    assert applied.result["live"] is True
    assert [c.tokens for c in generate(lab.port, 8, max_new_tokens=8)] == [8] * 8
    assert surgeon("status", "--host", "lab", "--json").result["state"]["state"] == "live"
    back = surgeon("rollback", "--host", "lab", "--yes", "--json")
    assert back.code == 0, back.stdout + back.stderr
    assert path.read_bytes() == from_wheel("0.5.9")
    assert not list(path.parent.glob("_surgeon*"))
