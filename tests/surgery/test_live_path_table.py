"""Surgeon's tables of the live path against what each release's own code does, cell by cell.

By default the releases at the edges of what changed are compared, with one explicit runner backend for each model and
quantization; SURGEON_LIVE_TABLE=all compares every release with every backend it offers (`python -m
tests.support.live_table` does the same and prints what differs).
"""

from __future__ import annotations

import os

import pytest

from tests.support.live_table import GPUS, RELEASES, compare, derive

EDGES = (
    *("0.4.6", "0.4.9", "0.4.10", "0.5.1", "0.5.2", "0.5.5", "0.5.6", "0.5.9", "0.5.10", "0.5.11", "0.5.13"),
    *("0.5.17", "0.5.20", "0.5.21", "0.5.23"),
)
ALL = os.environ.get("SURGEON_LIVE_TABLE") == "all"


@pytest.mark.wheels
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", RELEASES if ALL else EDGES)
def test_every_cell_is_as_the_release_acts(version: str) -> None:
    """Verdict, backend, format, fused shared experts and leaf; open only where the weights decide, as in 0.5.11."""
    for capability in GPUS:
        found = compare(version, capability, derive(version, capability, quick=not ALL))
        assert found.differing == ()
        # An oracle that refuses everything would prove nothing.
        assert found.cells - found.refused >= found.cells / 4
        expected = {"whether the checkpoint's experts are stored in fp8"} if version == "0.5.11" else set()
        assert {missing for _, missing in found.open} <= expected


@pytest.mark.wheels
def test_the_oracle_sees_what_was_read_by_hand() -> None:
    """Four cells that were read in the wheel of 0.5.9 by eye: the oracle is no echo of the tables."""
    cells = derive("0.5.9", (10, 0), quick=True)
    seen = {
        (cell["model"], cell["quantization"]): (cell["resolved_backend"], cell["format"], cell["fused"], cell["leaf"])
        for cell in cells
        if cell["backend"] == "auto" and cell["fusion"] and not cell["refused"]
    }
    assert seen["DeepSeek-V3", "fp8"] == ("flashinfer_trtllm", "BYPASSED", 0, "")
    assert seen["GLM-5", "bf16"] == ("auto", "STANDARD", 1, "biased_grouped_topk_impl")
    assert seen["GLM-4.6", "modelopt_fp4"] == ("flashinfer_trtllm", "BYPASSED", 0, "")
    assert seen["GLM-4.6", "fp8"] == ("auto", "STANDARD", 1, "biased_grouped_topk_impl")
