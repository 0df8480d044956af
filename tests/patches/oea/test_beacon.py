"""The beacon: what a process says about itself, when, and that saying it never harms the forward pass."""

from __future__ import annotations

import json
import stat
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

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


def test_grows_with_what_the_process_has_seen(install: Callable[..., Installed]) -> None:
    """First a prefill that is left alone, then the layer count as layer ids repeat, then the re-routed pass."""
    told = (
        install(k0=2)
        .run("""
seen = []
step(100, layer_id=1); seen.append(beacon())
for layer in (2, 3, 1): step(100, layer_id=layer)
seen.append(beacon())
step(8, layer_id=1); seen.append(beacon())
seen.append(oea._JOURNAL.open)
step(200, layer_id=2); seen.append(beacon())
print(json.dumps(seen))
""")
        .answer
    )
    first, layers, applied, still_open, last = told
    assert (first["applied"], first["rows"], first["layers"]) == (False, 100, None)
    assert first["skipped"] == "rows outside 3..64"
    assert (layers["layers"], layers["applied"]) == (3, False)
    assert (applied["applied"], applied["rows"]) == (True, 8)
    assert still_open is False
    assert last == applied


def test_tells_a_captured_graph_from_an_eager_pass(install: Callable[..., Installed]) -> None:
    """Where sglang says that it is capturing, warm-up passes included, the beacon says graph."""
    told = (
        install(k0=2)
        .run(
            """
import types
name = "sglang.srt.model_executor.cuda_graph_runner"
sys.modules[name] = types.SimpleNamespace(get_is_capture_mode=lambda: True)
sys.modules["sglang"] = types.SimpleNamespace(__version__="0.5.9")
step(8)"""
            + SHOW
        )
        .answer
    )
    assert (told["capture"], told["sglang_version"]) == ("graph", "0.5.9")


def test_counts_passes_and_changed_rows_with_stats_on(install: Callable[..., Installed]) -> None:
    """Counts are taken in one layer and reach the beacon within a second or two, from a thread."""
    told = (
        install(k0=1, stats=True)
        .run("""
import time
rows = 0
for number in range(5):
    for layer in (4, 5):
        given = torch.randn(8, 32, generator=torch.Generator().manual_seed(8)).softmax(-1).topk(4).indices
        rows += int((step(8, layer_id=layer)[1] != given).any(1).sum()) if layer == 4 else 0
deadline = time.monotonic() + 30
while (beacon()["passes"] or 0) < 5 and time.monotonic() < deadline: time.sleep(0.05)
print(json.dumps([rows, beacon()]))
""")
        .answer
    )
    rows, beacon = told
    assert beacon["passes"] == 5
    assert beacon["rows_changed"] == rows > 0


@pytest.mark.parametrize("obstacle", ["a file in the folder's place", "a folder in the beacon's place"])
def test_a_beacon_that_cannot_be_written_harms_nothing(obstacle: str, install: Callable[..., Installed]) -> None:
    """Routing goes on, with one warning, where the beacon cannot be written."""
    installed = install(k0=2, beacon_dir=str(install().folder / "beacons"))
    if obstacle.startswith("a file"):
        installed.beacons.write_text("")
        code = ""
    else:
        code = "os.makedirs(os.path.join('beacons', str(os.getpid()) + '.json'))\n"
    ended = installed.run(code + "print(json.dumps([step(8, layer_id=n)[1].shape[0] for n in (0, 1, 0)]))")
    assert ended.answer == [8, 8, 8]
    assert ended.err.count("no beacon written") == 1


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
