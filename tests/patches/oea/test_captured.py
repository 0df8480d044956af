"""Captured graphs: padding has no say, changes are obeyed without capturing anew, and only decode is captured."""

from __future__ import annotations

import re
import sys
import zipfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from surgeon.registry.wheels import fetch
from tests.support.passes import TARGET, Mode, Recording, batch_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

BUCKET = 8
K, EXPERTS = 6, 64


def layer(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a layer has at the grafted line."""
    logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights, ids = logits.softmax(-1).topk(K)
    return weights / weights.sum(-1, keepdim=True), ids.int(), logits


class DecodeCudaGraphRunner:
    """Stands where sglang's runner stands: on the stack while it captures."""

    def __init__(self, *, draft: bool = False) -> None:
        self.model_runner = SimpleNamespace(is_draft_worker=draft)

    def capture(self, work: Callable[[], Any]) -> Any:
        """Run what is captured."""
        return work()


class CudaGraphRunner(DecodeCudaGraphRunner):
    """Its name before 0.5.14."""


class EAGLEDraftCudaGraphRunner(DecodeCudaGraphRunner):
    """A draft model's, which from 0.5.14 on is a subclass."""


class FrozenKVMTPCudaGraphRunner(DecodeCudaGraphRunner):
    """Another draft model's."""


class PrefillCudaGraphRunner:
    """Prefill's."""

    model_runner = SimpleNamespace(is_draft_worker=False)

    def capture(self, work: Callable[[], Any]) -> Any:
        """Run what is captured."""
        return work()


class PiecewiseCudaGraphRunner(PrefillCudaGraphRunner):
    """Prefill's, before 0.5.14."""


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What sglang says of itself, that it captures; `on` says whether."""
    state = SimpleNamespace(on=False)
    module = SimpleNamespace(get_is_capture_mode=lambda: state.on)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner_utils.capture_mode", module)
    return state


class Graph:
    """A layer's routing, captured once for a bucket of rows with buffers that live on."""

    def __init__(self, runtime: ModuleType, capturing: SimpleNamespace, runner: Any) -> None:
        self.buffers = layer(BUCKET, 99)
        self.given = [tensor.clone() for tensor in self.buffers]
        self._recording = Recording()
        capturing.on = True
        with self._recording:
            self.out = runner.capture(lambda: runtime.route(*self.buffers, top_k=K))
        capturing.on = False

    def replay(self, fresh_rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy new rows over the first ones of the buffers, leave the others stale, and replay."""
        for buffer, rows in zip(self.buffers, fresh_rows, strict=True):
            buffer[: rows.shape[0]].copy_(rows)
        self._recording.replay()
        weights, ids = self.out
        return weights, ids


@pytest.mark.parametrize("runner", [DecodeCudaGraphRunner, CudaGraphRunner])
@pytest.mark.parametrize(
    "asked",
    [
        {"k0": 2, "min_rows": 1},
        {"k0_schedule": [[2, 3, 4], [4, 6, 3], [7, 8, 1]], "refill": "strict"},
        {"k0": 3, "p": 0.3, "budget": 12, "max_rank": 30, "k_max": 5, "denominator": "native_topk"},
    ],
)
def test_stale_rows_of_a_bucket_have_no_say(
    asked: dict[str, Any], runner: Any, fresh: Callable[..., ModuleType], capturing: SimpleNamespace
) -> None:
    """For every number of tokens in a bucket of 8, a replay gives exactly what those tokens alone give."""
    runtime = fresh(**asked)
    graph = Graph(runtime, capturing, runner())
    changed = 0
    for rows in [*range(1, BUCKET + 1), *reversed(range(1, BUCKET + 1))]:
        step = layer(rows, seed=rows)
        runtime.announce(TARGET, batch_of(Mode.DECODE, rows))
        weights, ids = graph.replay(step)
        alone = runtime.route(*step, top_k=K)
        assert torch.equal(weights[:rows], alone[0]), rows
        assert torch.equal(ids[:rows], alone[1]), rows
        assert torch.equal(ids[rows:], graph.buffers[1][rows:]), rows
        assert torch.equal(weights[rows:], graph.buffers[0][rows:]), rows
        changed += int((ids[:rows] != step[1]).any())
    assert changed > 6


def test_a_captured_graph_obeys_changed_settings(fresh: Callable[..., ModuleType], capturing: SimpleNamespace) -> None:
    """The same graph follows k0, a schedule, refill, off and on, as if it had been captured under each."""
    runtime = fresh(k0=2)
    graph = Graph(runtime, capturing, DecodeCudaGraphRunner())
    Settings, Loaded = runtime._settings.Settings, runtime._settings.Loaded  # noqa: N806 - classes
    woken = []
    changes: tuple[dict[str, Any], ...] = (
        {"k0": 1},
        {"k0": 4},
        {"k0_schedule": ((1, 7, 2), (8, 8, 5))},
        {"enabled": False},
        {"k0": 0},
        {"k0": 2, "refill": "strict"},
        {"k0": 1, "refill": "none"},
        {"k0": 6},
        {"k0": 2},
    )
    for generation, asked in enumerate(changes, start=2):
        at = runtime._NOW.number + 1
        runtime._NOW.arm(Loaded(Settings(generation=generation, at_pass=at, **asked), "file", None))
        assert runtime._NOW.refused is None
        runtime.announce(TARGET, batch_of(Mode.DECODE, BUCKET))
        step = layer(BUCKET, seed=5)
        weights, ids = graph.replay(step)
        alone = fresh(**asked)
        alone.announce(TARGET, batch_of(Mode.DECODE, BUCKET))
        expected = alone.route(*step, top_k=K)
        assert torch.equal(weights, expected[0])
        assert torch.equal(ids, expected[1])
        woken.append(len(set(ids.flatten().tolist())))
    native = len(set(layer(BUCKET, 5)[1].flatten().tolist()))
    assert woken[3] == woken[4] == woken[7] == native
    assert woken[0] < woken[8] < woken[1] < woken[2] < native


def test_a_replay_in_another_phase_changes_nothing(
    fresh: Callable[..., ModuleType], capturing: SimpleNamespace
) -> None:
    """Where a graph is replayed for a pass that is not decode, idle for example, no row changes."""
    runtime = fresh(k0=2)
    graph = Graph(runtime, capturing, DecodeCudaGraphRunner())
    step = layer(BUCKET, seed=3)
    for mode in (Mode.IDLE, Mode.EXTEND, Mode.MIXED):
        runtime.announce(TARGET, batch_of(mode, BUCKET))
        weights, ids = graph.replay(step)
        assert torch.equal(ids, step[1])
        assert torch.equal(weights, step[0])
    runtime.announce(TARGET, batch_of(Mode.DECODE, BUCKET))
    assert not torch.equal(graph.replay(step)[1], step[1])


@pytest.mark.parametrize(
    "runner",
    [
        PrefillCudaGraphRunner(),
        PiecewiseCudaGraphRunner(),
        EAGLEDraftCudaGraphRunner(),
        FrozenKVMTPCudaGraphRunner(),
        DecodeCudaGraphRunner(draft=True),
        SimpleNamespace(capture=lambda work: work()),
    ],
    ids=lambda runner: type(runner).__name__,
)
def test_graphs_of_other_runners_are_left_alone(
    runner: Any, fresh: Callable[..., ModuleType], capturing: SimpleNamespace
) -> None:
    """Prefill, draft models and whoever is not known capture the unchanged model, before any pass and after."""
    runtime = fresh(k0=2)
    for _ in range(2):
        graph = Graph(runtime, capturing, runner)
        assert graph.out[1] is graph.buffers[1]
        assert graph.out[0] is graph.buffers[0]
        runtime.announce(TARGET, batch_of(Mode.DECODE, BUCKET))
    assert not runtime._NOW.captured


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.4.6", "0.4.9", "0.5.1", "0.5.9", "0.5.13", "0.5.14", "0.5.18", "0.5.23"])
def test_of_a_releases_graph_runners_only_decode_captures(version: str, fresh: Callable[..., ModuleType]) -> None:
    """By its real classes, names and bases: the target's decode runners and no other, so none that is new either."""
    runtime = fresh(k0=2)
    with zipfile.ZipFile(fetch(version)) as wheel:
        paths = [path for path in wheel.namelist() if re.match(r"sglang/srt/.*graph_runner\.py$", path)]
        code = "\n".join(wheel.read(path).decode() for path in paths)
    found = dict(re.findall(r"^class (\w+)(?:\((\w*))?", code, re.MULTILINE))
    assert {"CudaGraphRunner", "DecodeCudaGraphRunner"} & set(found)
    made: dict[str, type] = {}

    def made_of(name: str) -> type:
        bases = (made_of(found[name]),) if found.get(name) in found else (object,)
        return made.setdefault(name, type(name, bases, {"capture": lambda self, work: work()}))  # noqa: ARG005

    captures = {name for name in found if made_of(name)().capture(runtime._runner) == runtime.DECODE}
    known = {"CudaGraphRunner", "DecodeCudaGraphRunner", "CPUGraphRunner", "NPUGraphRunner", "XPUGraphRunner"}
    assert captures == known & set(found)


def test_what_a_graph_does_not_hold_is_refused(fresh: Callable[..., ModuleType], capturing: SimpleNamespace) -> None:
    """A captured graph has no step for a budget and no bucket of more rows: such settings need a restart."""
    runtime = fresh(k0=2, max_rows=8)
    Graph(runtime, capturing, DecodeCudaGraphRunner())
    Settings, Loaded = runtime._settings.Settings, runtime._settings.Loaded  # noqa: N806 - classes
    refusals: tuple[tuple[dict[str, Any], str], ...] = (
        ({"budget": 20, "max_rows": 8}, "captured graphs hold no p, k_max, max_rank and budget"),
        ({"max_rows": 64}, "captured graphs are made for up to 8 rows, found 64"),
    )
    for asked, why in refusals:
        runtime._NOW.arm(Loaded(Settings(generation=2, at_pass=9, **asked), "file", None))
        assert why in runtime._NOW.refused["why"]
        assert runtime._NOW.armed is None


def test_nothing_is_written_while_a_draft_is_captured(
    fresh: Callable[..., ModuleType], capturing: SimpleNamespace
) -> None:
    """Draft runners announce inside a capture; a write there would be replayed with the graph."""
    runtime = fresh(k0=2)
    runtime.announce(TARGET, batch_of(Mode.DECODE, 5))
    capturing.on = True
    runtime.announce(TARGET, batch_of(Mode.DECODE, 3))
    capturing.on = False
    assert (int(runtime._NOW.real_rows), runtime._NOW.number) == (5, 1)


class TestCompiled:
    """torch.compile, as sglang's CPU graphs and --enable-torch-compile use it."""

    @pytest.fixture(autouse=True)
    def _clean(self) -> None:
        torch._dynamo.reset()

    def test_a_compiled_decode_obeys_without_tracing_again(self, fresh: Callable[..., ModuleType]) -> None:
        """Traced once by a decode runner, it follows the rows and the settings of later passes."""
        runtime = fresh(k0=2)
        traced = []

        def backend(graph: Any, _: Any) -> Any:
            traced.append(1)
            return graph.forward

        compiled = torch.compile(
            lambda *step: runtime.route(*step, top_k=K), fullgraph=True, dynamic=True, backend=backend
        )
        runner, step = CudaGraphRunner(), layer(BUCKET, 4)
        runner.capture(lambda: compiled(*step))
        for number, k0 in enumerate((2, 4, 6, 1), start=2):
            Settings, Loaded = runtime._settings.Settings, runtime._settings.Loaded  # noqa: N806 - classes
            at = runtime._NOW.number + 1
            runtime._NOW.arm(Loaded(Settings(k0=k0, generation=number, at_pass=at), "file", None))
            for rows in (8, 5):
                runtime.announce(TARGET, batch_of(Mode.DECODE, rows))
                found = compiled(*step)
                expected = runtime.route(*step, top_k=K)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert len(traced) == 1

    def test_a_compiled_prefill_is_the_unchanged_model(self, fresh: Callable[..., ModuleType]) -> None:
        """Traced by a prefill runner before any pass, it stays native whatever passes come."""
        runtime = fresh(k0=2)
        compiled = torch.compile(
            lambda *step: runtime.route(*step, top_k=K), fullgraph=True, dynamic=True, backend="eager"
        )
        step = layer(BUCKET, 4)
        PiecewiseCudaGraphRunner().capture(lambda: compiled(*step))
        for mode in (Mode.EXTEND, Mode.DECODE):
            runtime.announce(TARGET, batch_of(mode, BUCKET))
            assert torch.equal(compiled(*step)[1], step[1])

    def test_a_layer_compiled_without_a_runner_goes_by_the_pass(self, fresh: Callable[..., ModuleType]) -> None:
        """One compiled layer, called in decode and prefill alike, is re-routed in decode alone."""
        runtime = fresh(k0=2)
        compiled = torch.compile(
            lambda *step: runtime.route(*step, top_k=K), fullgraph=True, dynamic=True, backend="eager"
        )
        step = layer(BUCKET, 4)
        for mode in (Mode.DECODE, Mode.EXTEND, Mode.DECODE, Mode.MIXED):
            runtime.announce(TARGET, batch_of(mode, BUCKET))
            assert torch.equal(compiled(*step)[1], step[1]) == (mode != Mode.DECODE)


def test_ten_thousand_passes_leave_nothing_behind(fresh: Callable[..., ModuleType]) -> None:
    """The same batch gives the same bits each time, and memory does not grow."""
    runtime = fresh(k0=2)
    step = layer(4, 1)
    runtime.announce(TARGET, batch_of(Mode.DECODE, 4))
    first = [tensor.clone() for tensor in runtime.route(*step, top_k=K)]
    resident = []
    for number in range(10_000):
        runtime.announce(TARGET, batch_of(Mode.DECODE, 4))
        found = runtime.route(*step, top_k=K)
        if number % 1000 == 999:
            assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
            with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - a number, not a file
                resident.append(int(file.read().split()[1]))
    assert resident[-1] - resident[1] < 256, resident  # pages: 1 MiB
