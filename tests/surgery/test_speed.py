"""How long people wait for the search: on the longest topk.py there is, from a process that has nothing loaded yet."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.wheels import member

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.wheels

LIMIT_S = 0.8
LINES = 3200
# What this loop takes on the two-core machine that the limit is meant for. A core that others press on, or that is
# slower, gets as much more time for everything.
LOOP = "x = 0\nfor i in range(4_000_000): x += i"
LOOP_S = 0.2
ROUNDS = 5
WORK = """
import sys
from pathlib import Path
from surgeon import surgery
source = Path(sys.argv[1]).read_bytes()
assert isinstance(surgery.locate(source), surgery.Found)
grafted = surgery.graft(source, surgery.GraftSpec("oea", "0.1.0", "0123456789ab", wants=("top_k", "layer_id")))
assert "_surgeon_oea.route(" in surgery.unified_diff(source, grafted.result, "topk.py")
"""


def test_locate_graft_and_diff_take_less_than_the_limit(tmp_path: Path) -> None:
    """Processor time of a fresh process with its children, less the interpreter's start; the best of five decides."""
    source = tmp_path / "topk.py"
    text = member("0.5.23")
    source.write_bytes(text + b"# padding\n" * (LINES - len(text.splitlines())))
    assert len(source.read_bytes().splitlines()) == LINES
    # Unmeasured, so that bytecode is there as it is from the second command on.
    _processor_s(WORK, str(source))
    seen = []
    for _ in range(ROUNDS):
        start = _processor_s("")
        loop, work = _processor_s(LOOP) - start, _processor_s(WORK, str(source)) - start
        limit = LIMIT_S * max(1.0, loop / LOOP_S)
        seen.append(f"{work:.2f} s of {limit:.2f}")
        if work < limit:
            return
    pytest.fail(", ".join(seen))


def _processor_s(code: str, *arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
