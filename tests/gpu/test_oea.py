"""The script for a GPU, on a machine that has none: its dry run takes every step, in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from surgeon import lab

SCRIPT = Path(__file__).with_name("oea.py")


def test_takes_every_step_in_a_dry_run() -> None:
    """Cases, the padded graph, the tables of routing, of layer time over T and of each k0; and nothing is wrong."""
    path = os.pathsep.join((str(lab.torch_layer()), str(lab.triton_layer())))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--dry-run", "--cases", "6", "--batches", "1"],
        env={**os.environ, "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("DRY RUN")
    steps = [line for line in lines if re.match(r"\d\. ", line)]
    assert [line[0] for line in steps] == ["1", "2", "3", "4", "5"]
    assert re.search(r"[1-9]\d* of them re-routed; 0 batches wrong$", steps[0])
    assert steps[1].endswith("0 of 7 wrong")
    (top_k,) = [line.split() for line in lines if re.match(r" +16 +2 ", line)]
    assert len(top_k) == 8
    # With a smaller k0 the layer reads no more experts than with a greater one.
    reads = [float(line.split()[1]) for line in lines if re.match(r" +[34] +\d+\.\d ", line)]
    assert len(reads) == 2
    assert reads[0] >= reads[1]


def test_says_that_it_needs_a_gpu() -> None:
    """Without CUDA and without --dry-run it refuses, and names the way that there is."""
    path = os.pathsep.join((str(lab.torch_layer()), str(lab.triton_layer())))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "found none. --dry-run" in done.stderr
