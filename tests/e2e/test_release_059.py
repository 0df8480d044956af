"""The same on sglang 0.5.9, where both files are other ones with other sites."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from surgeon.lab import lifecycle
from surgeon.lab.loopback import generate
from tests.support.command import surgeon
from tests.support.witness import cut_files, from_wheel

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]


def test_inspect_apply_set_and_rollback_on_0_5_9(
    lab_up: Callable[[lifecycle.Wanted], lifecycle.Description],
) -> None:
    """Both sites are found, every worker proves the patch and changes k0 live, and the wheel's bytes return."""
    lab = lab_up(lifecycle.Wanted(sglang="0.5.9"))
    found = surgeon("inspect", "topk", "--host", "lab", "--json").result
    assert found["lines"] == 1099
    assert found["site"]["outcome"] == "found"
    assert "on_select_experts" in found["site"]["text"]
    assert (found["gate"]["by"], found["gate_site"]["outcome"]) == ("forward-mode", "found")
    applied = surgeon("apply", "oea", "--k0", "4", "--host", "lab", "--yes", "--json")
    assert applied.code == 0, applied.stdout + applied.stderr
    assert applied.result["live"] is True
    assert [c.tokens for c in generate(lab.port, 8, max_new_tokens=8)] == [8] * 8
    changed = surgeon("set", "oea", "--k0", "5", "--host", "lab", "--yes", "--json")
    assert changed.code == 0, changed.stdout + changed.stderr
    status = surgeon("status", "--host", "lab", "--json").result
    assert (status["state"]["state"], status["in_force"]["k0"]) == ("live", 5)
    back = surgeon("rollback", "--host", "lab", "--yes", "--json")
    assert back.code == 0, back.stdout + back.stderr
    assert [path.read_bytes() for path in cut_files(lab)] == from_wheel("0.5.9")
    assert not list(cut_files(lab)[0].parent.glob("_surgeon*"))
