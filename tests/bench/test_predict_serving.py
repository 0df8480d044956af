"""The published serving curve of GLM-5 on RTX PRO 6000, against layers measured by others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surgeon import patches
from surgeon.bench import latency, serving, shape
from surgeon.operations import predict, subject

README = Path(__file__).resolve().parents[2] / "README.md"
GLM_5 = shape.parse(latency.data("models")["GLM-5"])


def published() -> tuple[serving.Curve, latency.Layer]:
    """The curve, and the measured layer of its setup."""
    (curve,) = serving.curves()
    return curve, latency.layer(curve.gpu, curve.dtype, GLM_5.expert_mb(curve.dtype, tp=curve.tp))


def test_layers_and_two_numbers_give_the_whole_curve() -> None:
    """From 1 to 64 clients the tokens per second are within 2.5 % of what was published."""
    curve, layer = published()
    assert layer.kind == "measured"
    assert curve.clients == (1, 2, 4, 8, 16, 32, 64)
    for rows, rate in zip(curve.clients, curve.tok_s, strict=True):
        step = curve.rest.ms(rows) + serving.moe_ms(GLM_5, layer, rows)
        assert rows / step * 1e3 == pytest.approx(rate, rel=0.025)


def test_the_two_numbers_are_what_a_fit_of_the_points_gives() -> None:
    """What is shipped was not chosen by hand."""
    curve, layer = published()
    fixed, row = serving.fit(curve.clients, curve.tok_s, GLM_5, layer)
    assert curve.fixed_ms == pytest.approx(fixed, abs=0.005)
    assert curve.row_ms == pytest.approx(row, abs=0.00005)


def test_the_fit_finds_what_a_curve_was_made_of() -> None:
    """Points from a known step give its two numbers back."""
    _, layer = published()
    clients = (1, 4, 16, 64)
    rates = [rows / (9.0 + 0.2 * rows + serving.moe_ms(GLM_5, layer, rows)) * 1e3 for rows in clients]
    assert serving.fit(clients, rates, GLM_5, layer) == pytest.approx((9.0, 0.2))


def test_the_curve_is_that_of_one_setup_only() -> None:
    """Another GPU, split or model has none."""
    asked = {"gpu": "rtx-pro-6000", "dtype": "nvfp4", "tp": 8, "ep": 1}
    assert serving.curve(GLM_5, **asked) is not None  # type: ignore[arg-type]
    for other in ({"gpu": "b200"}, {"tp": 4}, {"ep": 8}, {"dtype": "fp8"}):
        assert serving.curve(GLM_5, **{**asked, **other}) is None  # type: ignore[arg-type]
    qwen = shape.parse(latency.data("models")["Qwen3-235B-A22B"])
    assert serving.curve(qwen, **asked) is None  # type: ignore[arg-type]


def test_the_claim_of_the_readme_is_what_the_command_predicts() -> None:
    """The one line about GLM-5 says that it is a prediction, and its numbers are recomputed here."""
    claim = re.search(
        r"predicted, not measured: .*?GLM-5-NVFP4 on eight RTX PRO 6000.*?(\d+) requests.*?k0 = (\d).*?"
        r"(\d+) %.*?unfused.*?(\d+) %.*?fused.*?(\d+) %.*?free",
        " ".join(README.read_text("utf-8").split()),
        re.IGNORECASE,
    )
    assert claim is not None
    rows, k0, *said = map(int, claim.groups())
    found = []
    for routing in ("unfused", "fused", "free"):
        asked = predict.Asked(gpu="rtx-pro-6000", tp=8, batches=(rows,), k0s=(k0,), routing=routing)
        outcome = predict.run(subject.named("GLM-5-NVFP4"), asked, patches.load("oea"))
        assert outcome.prediction.setup.rest is not None
        found.append(round(-outcome.prediction.cells[k0][0].change * 100))
    assert said == found
