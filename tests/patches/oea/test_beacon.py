"""The beacon: what a process says about itself, when, and that saying it never harms the forward pass."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tests.patches.oea.conftest import Installed

SHOW = "\nprint(json.dumps(beacon()))"


def test_tells_who_runs_what_with_which_settings(install: Callable[..., Installed]) -> None:
    """After one re-routed pass the beacon names process, start, rank, patch, settings and that it was applied."""
    installed = install(k0=2, generation=5)
    began = time.time()
    ended = installed.run("step(8)" + SHOW)
    told = ended.answer
    assert (told["schema"], told["pid"], told["state"]) == ("surgeon/beacon/1", ended.pid, "on")
    assert (told["rank"], told["world_size"], told["sglang_version"]) == (0, 1, None)
    assert (told["patch"], told["patch_version"], told["patch_hash"]) == ("oea", "0.2.0", "unset")
    assert (told["applied"], told["rows"], told["capture"], told["skipped"]) == (True, 8, "eager", None)
    assert (told["gate"], told["phase"], told["form"]) == ("row-count", "unknown", "torch")
    assert (told["settings"]["k0"], told["settings"]["refill"], told["settings"]["min_rows"]) == (2, "native", 3)
    assert (told["settings_source"], told["settings_problem"], told["generation"]) == ("file", None, 5)
    assert (told["passes"], told["layers"]) == (None, None)
    assert began - 2 < told["started"] <= told["written"] < time.time() + 1
    assert told["start_ticks"] > 0
    assert sorted(path.name for path in installed.beacons.iterdir()) == [f"{ended.pid}.json"]
    mode = stat.S_IMODE((installed.beacons / f"{ended.pid}.json").stat().st_mode)
    assert (mode, stat.S_IMODE(installed.beacons.stat().st_mode)) == (0o600, 0o700)


def step(runtime: ModuleType, rows: int, layer_id: int | None = None) -> torch.Tensor:
    """Route a batch, as the processes' own step does; which rows were changed."""
    logits = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    weights, ids = logits.softmax(-1).topk(4)
    weights = weights / weights.sum(-1, keepdim=True)
    routed = runtime.route(weights, ids.int(), logits, top_k=4, layer_id=layer_id)[1]
    return (routed != ids).any(1)


def beacon(runtime: ModuleType) -> Any:
    """What the runtime's beacon says."""
    return json.loads((Path(str(runtime.__file__)).parent / "beacons" / f"{os.getpid()}.json").read_text())


def test_grows_with_what_the_process_has_seen(fresh: Callable[..., ModuleType]) -> None:
    """First a prefill that is left alone, then the layer count as layer ids repeat, then the re-routed pass."""
    runtime = fresh(k0=2)
    step(runtime, 100, 1)
    told = beacon(runtime)
    assert (told["applied"], told["rows"], told["layers"]) == (False, 100, None)
    assert told["skipped"] == "rows outside 3..64"
    for layer in (2, 3, 1):
        step(runtime, 100, layer)
    told = beacon(runtime)
    assert (told["layers"], told["applied"]) == (3, False)
    step(runtime, 8, 1)
    told = beacon(runtime)
    assert (told["applied"], told["rows"]) == (True, 8)
    assert not runtime._JOURNAL.open
    step(runtime, 200, 2)
    assert beacon(runtime) == told


def test_tells_a_captured_graph_from_an_eager_pass(
    fresh: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sglang says that it captures, warm-up passes included, the beacon says graph, and whose if not decode's."""
    name = "sglang.srt.model_executor.cuda_graph_runner"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(get_is_capture_mode=lambda: True))
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.9"))
    runtime = fresh(k0=2)
    step(runtime, 8)
    told = beacon(runtime)
    assert (told["capture"], told["sglang_version"]) == ("graph", "0.5.9")
    assert (told["applied"], told["skipped"]) == (False, "a graph captured by no runner that is known")


def test_counts_passes_and_changed_rows_with_stats_on(
    install: Callable[..., Installed], rank: Callable[[Installed], ModuleType]
) -> None:
    """Counts are taken in one layer and reach the beacon within a second or two, from a thread."""
    runtime = rank(install(k0=1, stats=True))
    rows = 0
    for _ in range(5):
        rows += int(step(runtime, 8, 4).sum())
        step(runtime, 8, 5)
    deadline = time.monotonic() + 30
    while (beacon(runtime)["passes"] or 0) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    told = beacon(runtime)
    assert told["passes"] == 5
    assert told["rows_changed"] == rows > 0


def test_reasons_do_not_pile_up(fresh: Callable[..., ModuleType]) -> None:
    """However many reasons to leave passes alone there are, the beacon stays small."""
    runtime = fresh(k0=2)
    for number in range(100):
        runtime._JOURNAL.see(8, None, f"reason {number}", captured=False)
    assert beacon(runtime)["skipped"].count(";") == 19


@pytest.mark.parametrize("obstacle", ["a file in the folder's place", "a folder in the beacon's place"])
def test_a_beacon_that_cannot_be_written_harms_nothing(
    obstacle: str,
    install: Callable[..., Installed],
    rank: Callable[[Installed], ModuleType],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Routing goes on, with one warning, where the beacon cannot be written."""
    installed = install(k0=2)
    if obstacle.startswith("a file"):
        installed.beacons.write_text("")
    else:
        (installed.beacons / f"{os.getpid()}.json").mkdir(parents=True)
    runtime = rank(installed)
    assert all(step(runtime, 8, layer).any() for layer in (0, 1, 0))
    assert caplog.text.count("no beacon written") == 1


def test_each_rank_speaks_for_itself(install: Callable[..., Installed]) -> None:
    """Two ranks of one group write two beacons with their own ranks, and route alike."""
    installed = install(k0=2)
    code = f"""
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{installed.folder}/meet", rank=int(os.environ["R"]), world_size=2)
weights, ids = step(8)
dist.barrier()
dist.destroy_process_group()
told = beacon()
print(json.dumps([told["rank"], told["world_size"], ids.tolist(), weights.tolist()]))
"""
    both = [installed.start(code, R=str(rank)) for rank in (0, 1)]
    answers = []
    for process in both:
        with process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        answers.append(json.loads(out))
    assert [answer[:2] for answer in answers] == [[0, 2], [1, 2]]
    assert answers[0][2:] == answers[1][2:]
    assert len(list(installed.beacons.iterdir())) == 2
