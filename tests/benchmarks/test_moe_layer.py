"""The CPU benchmark of a layer: that it computes a layer, routes as it says, and reports what it measured."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surgeon import lab

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).with_name("moe_layer.py")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module, with torch in reach."""
    layer = str(lab.torch_layer())
    if layer not in sys.path:
        sys.path.append(layer)
    spec = importlib.util.spec_from_file_location("moe_layer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moe_layer"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_computes_what_a_layer_is(bench: ModuleType) -> None:
    """Its output is the weighted sum of gated experts, worked out here row by row."""
    import torch

    shape = bench.Shape(experts=6, hidden=8, width=4, k=3, rows=5)
    layer = bench.Layer(shape, 1)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    weights, ids = bench.router(layer, shape, shape.k, bench.operator())(hidden)
    for row in range(5):
        expected = torch.zeros(8)
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            gate, up = (layer.gate_up[expert] @ hidden[row]).chunk(2)
            expected += weight * (layer.down[expert] @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(layer.forward(hidden, weights, ids)[row], expected, rtol=1e-5, atol=1e-6)


def test_reads_fewer_experts_with_a_smaller_k0(bench: ModuleType) -> None:
    """On the same batches each smaller k0 reads fewer experts; every way is timed in every round."""
    told = bench.measure(bench.Shape(experts=64, hidden=16, width=8, k=8, rows=16), (6, 4, 2), 4, 1)
    assert [way.name for way in told] == ["native", "k0 = 6", "k0 = 4", "k0 = 2"]
    assert all(len(way.seconds) == len(way.experts) == 4 and min(way.seconds) > 0 for way in told)
    reads = [sum(way.experts) for way in told]
    assert reads == sorted(reads, reverse=True)
    assert len(set(reads)) == 4


def ways(bench: ModuleType, four: list[float]) -> list[object]:
    """Measurements with known answers: native, k0 = 4 as told, and k0 = 2."""
    return [
        bench.Measured("native", [3.0, 2.0, 5.0], [20, 20, 20]),
        bench.Measured("k0 = 4", four, [10, 10, 10]),
        bench.Measured("k0 = 2", [1.2, 0.7, 1.2], [5, 5, 5]),
    ]


def test_reports_the_middle_ratio_and_the_fit(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios are taken within rounds: 0.5, 0.6 and 0.4; the line goes through (20, 3.0), (10, 1.5) and (5, 1.2)."""
    shape = bench.Shape(experts=8, hidden=16, width=8, k=8, rows=4)
    fit, share = bench.report(shape, ways(bench, [1.5, 1.2, 2.0]), 1)
    assert share == pytest.approx(0.5)
    assert fit == pytest.approx(14.5**2 / (116 + 2 / 3) / 1.86)
    assert "0.40-0.60" in capsys.readouterr().out


@pytest.mark.parametrize(("four", "status"), [([1.5, 1.2, 2.0], 0), ([2.7, 1.8, 4.5], 1), ([1.5, 0.1, 0.1], 1)])
def test_fails_where_a_limit_is_passed(
    four: list[float], status: int, bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with 1 if k0 = 4 takes 0.9 of native, or if its time is far off the line."""
    monkeypatch.setattr(bench, "measure", lambda *_: ways(bench, four))
    assert bench.main([]) == status


def test_runs_and_prints_a_table() -> None:
    """As a program, small and without its limits: a row for each way, and the line through them."""
    size = ["--experts", "32", "--hidden", "64", "--width", "32", "--rounds", "3", "--no-limits"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *size], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if re.match(r"native|k0 = \d", line)]
    assert [row[:6] for row in rows] == ["native", "k0 = 6", "k0 = 5", "k0 = 4", "k0 = 3", "k0 = 2"]
    assert re.search(r"medians: .* R\^2 [01]\.\d+", done.stdout)
