"""``surgeon record routing`` on a real server: its own recorder, read with and without torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surgeon.bench import active, recording
from surgeon.lab import recorder
from tests.support import lab as support
from tests.support.command import surgeon

if TYPE_CHECKING:
    from surgeon.lab.lifecycle import Description

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def lab() -> Description:
    """The default lab, reused if it runs."""
    return support.running()


def test_a_load_is_recorded_and_read_as_torch_reads_it(lab: Description, tmp_path: Path) -> None:
    """Every count is torch's, T follows the uniform formula, and nothing stays behind on the node."""
    before = set(Path(lab.recordings).glob("*")) if Path(lab.recordings).is_dir() else set()
    kept = tmp_path / "kept.pt"
    done = surgeon("record", "routing", "--host", "lab", "--load", "16", "--out", str(kept), "--json")
    assert done.code == 0, done.stdout + done.stderr
    assert set(Path(lab.recordings).glob("*")) == before

    ours = recording.read("kept", kept.read_bytes(), top_k=lab.top_k)
    assert ours == recorder.read([kept], python=Path(lab.python), top_k=lab.top_k)
    assert {one.layers for one in ours} == {(1, 2, 3)}

    said = done.result
    assert (said["experts"], said["k"], said["usual_batch"], said["ranks"]) == (lab.experts, lab.top_k, 16, 1)
    size = next(one for one in said["batches"] if one["rows"] == 16)
    assert size["passes"] >= 40
    assert size["active"] == pytest.approx(recorder.mean_active(ours, rows=16))
    assert size["uniform"] == pytest.approx(active.uniform(lab.experts, lab.top_k, 16))
    assert size["active"] == pytest.approx(size["uniform"], rel=0.06)

    words = (
        "--host",
        "lab",
        "--b-us",
        "2",
        "--c-us",
        "20",
        "--routing",
        "free",
        "--batch",
        "16",
        "--k0",
        "4",
        "--json",
    )
    predicted = surgeon("predict", "oea", *words, "--from-recording", str(kept))
    assert predicted.code == 0, predicted.stdout + predicted.stderr
    native, (cell,) = predicted.result["native"][0], predicted.result["k0"]["4"]["batches"]
    assert native["active_experts"] == pytest.approx(size["active"], abs=0.001)
    assert cell["active_experts"] == pytest.approx(active.uniform(lab.experts, 4, 16), rel=0.06)
    expected = (20 + 2 * cell["active_experts"]) / (20 + 2 * native["active_experts"]) - 1
    assert cell["time_change"] == pytest.approx(expected, abs=0.0001)


def test_traffic_of_others_is_listened_to(lab: Description) -> None:
    """What the server decodes for somebody else while surgeon listens is what is told of."""
    ended = threading.Event()

    def traffic() -> None:
        seed = 5
        while not ended.is_set():
            support.generate(lab.port, 5, max_new_tokens=64, seed=seed)
            seed += 1

    others = threading.Thread(target=traffic)
    others.start()
    try:
        done = surgeon("record", "routing", "--host", "lab", "--seconds", "6", "--json")
    finally:
        ended.set()
        others.join()
    assert done.code == 0, done.stdout + done.stderr
    assert done.result["usual_batch"] == 5
    assert done.result["decode_passes"] > 3
