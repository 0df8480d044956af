"""The lab for real: sglang serves, is reached through SSH, and routes as the formula says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surgeon.lab import lifecycle, recorder
from tests.support import lab as support

if TYPE_CHECKING:
    from surgeon.lab.lifecycle import Description

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def lab() -> Description:
    """The default lab, as its wheel made it; left running for whoever comes next."""
    return support.running(fresh=True)


def test_sixteen_requests_use_as_many_experts_as_the_formula_says(lab: Description) -> None:
    """Unpatched, the recorder sees about 56 of 64 experts in passes of 16 rows; independent rows give 56.4."""
    passes = support.record(lab, lambda: support.generate(lab.port, 16, seed=os.getpid()))
    decode = [seen for seen in passes if seen.rows == 16]
    assert len(decode) >= 20
    assert {seen.layers for seen in decode} == {(1, 2, 3)}
    uniform = recorder.expected_active(lab.experts, lab.top_k, 16)
    assert recorder.mean_active(passes, rows=16) == pytest.approx(uniform, rel=0.06)


def test_every_request_runs_to_its_length(lab: Description) -> None:
    """The server's own count of completion tokens is what was asked for."""
    assert support.generate(lab.port, 5, input_len=20, max_new_tokens=7, seed=os.getpid()) == [7] * 5


def test_a_second_up_reuses_everything(lab: Description) -> None:
    """Nothing is built or started twice, and it is said."""
    again = lifecycle.up()
    assert (again.made, len(again.reused)) == ((), 4)
    assert again.description == lab


def test_the_server_runs_as_a_user_would_run_it(lab: Description) -> None:
    """Its command line is the plain one, it leads its own process group, and its log is on disk."""
    found = lifecycle.status()
    assert found.serving
    assert found.server_pid is not None
    argv = Path(f"/proc/{found.server_pid}/cmdline").read_bytes().decode().split("\0")
    assert argv[:3] == [lab.python, "-m", "sglang.launch_server"]
    assert os.getpgid(found.server_pid) == found.server_pid
    assert "fired up" in Path(lab.log).read_text(encoding="utf-8")


def test_the_node_is_reached_through_ssh(lab: Description) -> None:
    """Over SSH, the node's interpreter has sglang, and importing it from there needs no torch."""
    code = "import importlib.metadata as m, sys; print(m.version('sglang'), 'torch' in sys.modules)"
    words = ["ssh", "-F", lab.ssh_config, lab.host, f'{lab.python} -c "{code}"']
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout.split() == [lab.wanted.sglang, "False"], done.stderr


def test_fresh_left_nothing_beside_the_patched_file(lab: Description) -> None:
    """After `up --fresh` the package holds what its RECORD lists, and the description says where all is."""
    code = "from importlib.util import find_spec; print(find_spec('sglang').origin)"
    done = subprocess.run([lab.python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    beside = Path(done.stdout.strip()).parent / "srt" / "layers" / "moe"
    assert not list(beside.glob("_surgeon*"))
    assert "surgeon" not in (beside / "topk.py").read_text(encoding="utf-8")
    assert json.loads(json.dumps(lab.as_json()))["sglang"] == "0.5.23"
