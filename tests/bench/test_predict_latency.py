"""Layer times: the shipped rows against what others published, and what is told from them."""

from __future__ import annotations

import pytest

from surgeon.bench import latency
from surgeon.errors import DoesNotFitError, UsageError

# arXiv 2511.02237, Qwen3-30B-A3B, bf16, one H100, batches of up to 16: T (table 4) and MoE layer time in us (table 3).
PAPER = {3: (25.1, 106.8), 4: (29.9, 120.9), 5: (35.1, 136.0), 6: (40.3, 151.3), 7: (44.4, 163.0), 8: (48.8, 175.7)}


@pytest.mark.parametrize("k0", PAPER)
def test_the_h100_row_gives_the_papers_layer_times(k0: int) -> None:
    """Two measurements by different people, on the same GPU and model, are within 8 %."""
    found = latency.layer("h100", "bf16", 9.44)
    count, us = PAPER[k0]
    assert found.kind == "measured"
    assert found.us(count) == pytest.approx(us, rel=0.08)


def test_a_size_between_two_measured_ones_is_interpolated() -> None:
    """Each inner row of the GPU with four of one kind is told from its neighbours within 3 %."""
    rows = [row for row in latency.rows() if (row.gpu, row.dtype) == ("rtx-pro-6000", "nvfp4")]
    assert [row.mb for row in sorted(rows, key=lambda row: row.mb)] == [2.65, 5.3, 10.6, 21.23]
    for low, inner, high in ((2.65, 5.3, 10.6), (5.3, 10.6, 21.23)):
        b = {row.mb: row.b for row in rows}
        told = b[low] + (inner - low) / (high - low) * (b[high] - b[low])
        assert told == pytest.approx(b[inner], rel=0.03)
    found = latency.layer("rtx-pro-6000", "nvfp4", 7.95)
    assert found.kind == "interpolated"
    assert found.b == pytest.approx((3.91 + 7.39) / 2)
    assert found.c == pytest.approx(53.5)
    assert "interpolated" in found.why


def test_a_size_outside_is_scaled_and_says_how_far_off_it_may_be() -> None:
    """Scaling one end of the measured range to the other shows what the stated uncertainty is worth."""
    found = latency.layer("rtx-pro-6000", "nvfp4", 42.46)
    assert found.kind == "scaled"
    assert found.b == pytest.approx(28.7)
    assert found.c == 68
    assert "a quarter" in found.why
    for gpu, small, large in (("rtx-pro-6000", 2.33, 14.35), ("b200", 0.46, 2.89)):
        assert {row.b for row in latency.rows() if row.gpu == gpu} >= {small, large}
        assert abs(large * 2.65 / 21.23 / small - 1) < found.uncertainty


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("rtx-pro-6000", "rtx-pro-6000"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_a_gpu_goes_by_its_short_name_or_nvidias(name: str, known: str) -> None:
    """What nvidia-smi prints is understood."""
    assert latency.gpu(name).id == known


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA A100-SXM4-80GB"]
)
def test_a_gpu_that_nobody_measured_is_refused(name: str) -> None:
    """Names that resemble a measured one have another memory; those that are known are listed."""
    with pytest.raises(DoesNotFitError, match="measured ones: rtx-pro-6000, b200, h100, h200") as refused:
        latency.gpu(name)
    assert refused.value.code == "unknown-gpu"
    assert "--b-us" in refused.value.advice


@pytest.mark.parametrize(
    ("gpu", "dtype", "mb", "kernel"),
    [("h100", "nvfp4", 9.44, None), ("h200", "bf16", 100.0, None), ("h100", "bf16", 9.44, "flashinfer_cutlass")],
    ids=["dtype", "size", "kernel"],
)
def test_nothing_is_carried_over_from_another_dtype_or_kernel_or_far_size(
    gpu: str, dtype: str, mb: float, kernel: str | None
) -> None:
    """The refusal says what was measured on that GPU."""
    with pytest.raises(DoesNotFitError, match=r"measured there: bf16 triton 9\.44 MB") as refused:
        latency.layer(gpu, dtype, mb, kernel=kernel)
    assert refused.value.code == "unknown-layer"


def test_a_given_layer_must_make_sense() -> None:
    """An expert costs something."""
    assert latency.given(2.0, 10.0).us(5) == pytest.approx(20)
    with pytest.raises(UsageError, match="expected b above 0"):
        latency.given(0.0, 10.0)
