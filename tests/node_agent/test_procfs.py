"""What /proc tells, held against clocks of our own."""

from __future__ import annotations

import subprocess
import sys
import time

from surgeon.node.agent import procfs


def test_a_processs_start_is_known_to_a_few_hundredths_of_a_second() -> None:
    """A server that is restarted half a second after a write must not look older than the write."""
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        after = time.time()
        process = procfs.process(child.pid)
        child.communicate(b"\n")
    assert process is not None
    assert before - 0.03 <= procfs.epoch(process.start_ticks) <= after + 0.03
