"""The main job on a real sglang server behind a real SSH server; sglang's own recorder is the witness."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surgeon.lab import lifecycle, recorder
from surgeon.lab.loopback import generate
from tests.support.command import surgeon
from tests.support.witness import from_wheel, topk_file

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]

IN_FLIGHT = 16
LONG_PROMPT = 180
K0 = 4
SEEDS = range(11, 15)


def decode(lab: lifecycle.Description, seeds: range) -> tuple[recorder.Pass, ...]:
    """The recorded decode passes of IN_FLIGHT rows, over several sampled sets of prompts: rows stay independent."""

    def load() -> None:
        for seed in seeds:
            generate(lab.port, IN_FLIGHT, input_len=96, max_new_tokens=32, seed=seed, temperature=1.0)

    passes = recorder.record(
        lab.port,
        Path(lab.recordings),
        load,
        python=Path(lab.python),
        top_k=lab.top_k,
    )
    found = tuple(p for p in passes if p.rows == IN_FLIGHT)
    assert len(found) >= 20 * len(seeds), f"too few passes of {IN_FLIGHT} rows: {[p.rows for p in passes]}"
    return found


def prefill(lab: lifecycle.Description) -> tuple[tuple[int, ...], ...]:
    """What one long prompt routes, expert by expert, in its prefill pass."""
    passes = recorder.record(
        lab.port,
        Path(lab.recordings),
        lambda: generate(lab.port, 1, input_len=LONG_PROMPT, max_new_tokens=1, seed=4711),
        python=Path(lab.python),
        top_k=lab.top_k,
    )
    (found,) = (p for p in passes if p.rows > 64)
    return found.counts


def slots(passes: tuple[recorder.Pass, ...]) -> set[int]:
    """Expert slots that were filled, per layer and pass."""
    return {sum(layer) for p in passes for layer in p.counts}


def test_apply_thins_out_decode_and_rollback_brings_every_byte_back(
    lab_up: Callable[[lifecycle.Wanted], lifecycle.Description],
) -> None:
    """Unpatched T follows the uniform formula, patched T that of k0, prefill is untouched, and rollback is exact."""
    lab = lab_up(lifecycle.Wanted())
    path = topk_file(lab)
    assert path.read_bytes() == from_wheel("0.5.23")

    before = decode(lab, SEEDS)
    long_before = prefill(lab)
    unpatched = recorder.mean_active(before, rows=IN_FLIGHT)
    assert unpatched == pytest.approx(recorder.expected_active(lab.experts, lab.top_k, IN_FLIGHT), rel=0.06)

    applied = surgeon("apply", "oea", "--k0", str(K0), "--host", "lab", "--yes", "--json")
    assert applied.code == 0, applied.stdout + applied.stderr
    assert applied.result["status"] == "applied"
    assert applied.result["live"] is True
    assert [g["name"] for g in applied.result["gates"] if not g["passed"]] == []
    assert {"beacons", "smoke"} <= {g["name"] for g in applied.result["gates"]}
    assert applied.result["unpatched"]["output_tok_s"] > 0

    after = decode(lab, SEEDS)
    patched = recorder.mean_active(after, rows=IN_FLIGHT)
    assert patched == pytest.approx(recorder.expected_active(lab.experts, K0, IN_FLIGHT), rel=0.08)
    assert patched <= 0.80 * unpatched
    assert slots(after) == slots(before) == {IN_FLIGHT * lab.top_k}
    assert prefill(lab) == long_before

    status = surgeon("status", "--host", "lab", "--json").result
    assert status["state"]["state"] == "live"
    assert [r["beacon"]["settings"]["k0"] for r in status["ranks"]] == [K0]

    again = surgeon("apply", "oea", "--k0", str(K0), "--host", "lab", "--yes", "--json")
    assert (again.code, again.result["status"]) == (0, "unchanged")

    back = surgeon("rollback", "--host", "lab", "--yes", "--json")
    assert back.code == 0, back.stdout + back.stderr
    assert path.read_bytes() == from_wheel("0.5.23")
    assert back.result["sha256"] == hashlib.sha256(from_wheel("0.5.23")).hexdigest()
    assert not list(path.parent.glob("_surgeon*"))
    assert not list(path.parent.glob(".*surgeon*"))
    restored = recorder.mean_active(decode(lab, SEEDS), rows=IN_FLIGHT)
    assert restored == pytest.approx(unpatched, rel=0.04)


def test_a_varied_correction_bias_is_ranked_with_and_not_weighted_with(
    lab_up: Callable[[lifecycle.Wanted], lifecycle.Description],
) -> None:
    """With a bias, unpatched T follows the experts' own shares, and the patch still thins decode out."""
    lab = lab_up(lifecycle.Wanted(bias=0.05))
    before = decode(lab, SEEDS)
    unpatched = recorder.mean_active(before, rows=IN_FLIGHT)
    assert unpatched == pytest.approx(_expected_from_shares(before), rel=0.06)
    applied = surgeon("apply", "oea", "--k0", str(K0), "--host", "lab", "--yes", "--no-bench", "--json")
    assert applied.code == 0, applied.stdout + applied.stderr
    after = decode(lab, SEEDS)
    assert recorder.mean_active(after, rows=IN_FLIGHT) <= 0.85 * unpatched
    assert slots(after) == {IN_FLIGHT * lab.top_k}


def _expected_from_shares(passes: tuple[recorder.Pass, ...]) -> float:
    """sum_e 1 - (1 - p_e)^B, p_e being the share of rows that chose expert e, averaged over layers."""
    rows = sum(p.rows for p in passes)
    layers = len(passes[0].counts)
    total = 0.0
    for layer in range(layers):
        chosen = [sum(p.counts[layer][e] for p in passes) for e in range(len(passes[0].counts[layer]))]
        total += sum(1 - (1 - c / rows) ** IN_FLIGHT for c in chosen)
    return total / layers
