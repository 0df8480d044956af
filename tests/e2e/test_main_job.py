"""The main job on a real sglang server behind a real SSH server; sglang's own recorder is the witness."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING

import pytest

from surgeon.lab import lifecycle, recorder
from surgeon.lab.loopback import generate, post
from tests.support.command import surgeon
from tests.support.lab import record
from tests.support.witness import cut_files, from_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]

IN_FLIGHT = 16
K0 = 4
OTHERS = (7, 6, 5, 3, 2)
CHUNK = 128
# Prompts whose prefill has as many rows as a decode batch may have, and one that is taken in two chunks.
PREFILLS = (5, 11, 64, 180)
PREFILL_ROWS = (5, 11, 64, CHUNK, 180 - CHUNK)
TALKERS, GUEST = 8, 12
SEEDS = (11, 12)


def decode(lab: lifecycle.Description, seeds: Iterable[int]) -> None:
    """Have IN_FLIGHT requests decode together, over several sampled sets of prompts: rows stay independent."""
    for seed in seeds:
        generate(lab.port, IN_FLIGHT, input_len=16, max_new_tokens=32, seed=seed, temperature=1.0)


def decodes(passes: Iterable[recorder.Pass]) -> list[tuple[recorder.Pass, ...]]:
    """The passes of IN_FLIGHT rows, apart where settings changed: a change makes many passes of one row."""
    groups: list[tuple[recorder.Pass, ...]] = [()]
    for alone, run in groupby(passes, lambda one: one.rows == 1):
        found = tuple(run)
        if alone and len(found) > 10 and groups[-1]:
            groups.append(())
        elif not alone:
            groups[-1] += tuple(one for one in found if one.rows == IN_FLIGHT)
    return [group for group in groups if group]


def decode_and_prefill(lab: lifecycle.Description) -> None:
    """Both, one after the other."""
    decode(lab, SEEDS)
    prefill(lab)


def prefill(lab: lifecycle.Description) -> None:
    """Prefill prompts that no cache knows, each alone."""
    post(lab.port, "/flush_cache")
    for length in PREFILLS:
        generate(lab.port, 1, input_len=length, max_new_tokens=1, seed=4711 + length)


def prefill_and_mix(lab: lifecycle.Description) -> None:
    """Prefill; and while TALKERS requests decode, let prompts come in that are prefilled in the same passes."""
    prefill(lab)
    with ThreadPoolExecutor() as pool:
        talk = pool.submit(generate, lab.port, TALKERS, input_len=16, max_new_tokens=96, seed=5, temperature=1.0)
        for seed in range(100, 106):
            generate(lab.port, 1, input_len=GUEST, max_new_tokens=1, seed=seed)
        talk.result()


def text(lab: lifecycle.Description) -> str:
    """What one greedy request says."""
    post(lab.port, "/flush_cache")
    return generate(lab.port, 1, input_len=24, max_new_tokens=48, seed=3)[0].text


def change(*words: str) -> None:
    """Change settings of the running server."""
    answer = surgeon("set", "oea", *words, "--host", "lab", "--yes", "--json")
    assert answer.code == 0, answer.stdout + answer.stderr
    assert answer.result["status"] == "set"


def each_k0_thins_out_by_the_formula(lab: lifecycle.Description) -> None:
    """In one process, from k0 = 4 over all others to off: T within 8 percent, and no slot is lost."""

    def every_k0() -> None:
        decode(lab, SEEDS)
        for k0 in OTHERS:
            change("--k0", str(k0))
            decode(lab, SEEDS)
        change("--off")
        decode(lab, SEEDS)

    groups = decodes(record(lab, every_k0))
    assert len(groups) == 2 + len(OTHERS)
    for k0, group in zip((K0, *OTHERS, lab.top_k), groups, strict=True):
        assert len(group) >= 20 * len(SEEDS), (k0, len(group))
        found = recorder.mean_active(group, rows=IN_FLIGHT)
        assert found == pytest.approx(recorder.expected_active(lab.experts, k0, IN_FLIGHT), rel=0.08), k0
        assert {sum(layer) for one in group for layer in one.counts} == {IN_FLIGHT * lab.top_k}


def prefill_is_routed_as(lab: lifecycle.Description, before: Sequence[recorder.Pass]) -> None:
    """The same prompts route as unpatched, whole or in chunks; passes that hold prompts and decode do not thin out."""
    after = record(lab, lambda: prefill_and_mix(lab))
    alone = after[: len(PREFILL_ROWS)]
    assert tuple(one.rows for one in alone) == tuple(one.rows for one in before) == PREFILL_ROWS
    assert [one.counts for one in alone] == [one.counts for one in before]
    rest = after[len(PREFILL_ROWS) :]
    talking = recorder.mean_active(rest, rows=TALKERS)
    assert talking == pytest.approx(recorder.expected_active(lab.experts, OTHERS[-1], TALKERS), rel=0.12)
    mixed = recorder.mean_active(rest, rows=TALKERS + GUEST)
    assert mixed == pytest.approx(recorder.expected_active(lab.experts, lab.top_k, TALKERS + GUEST), rel=0.08)


def test_apply_thins_out_decode_alone_settings_change_live_and_rollback_brings_every_byte_back(
    lab_up: Callable[[lifecycle.Wanted], lifecycle.Description],
) -> None:
    """T follows the formula for every k0 in one process, prefill is untouched however it comes, rollback is exact."""
    options = ("--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk")
    lab = lab_up(lifecycle.Wanted(options=options))
    originals = from_wheel("0.5.23")
    assert [path.read_bytes() for path in cut_files(lab)] == originals

    said = text(lab)
    before = record(lab, lambda: decode_and_prefill(lab))
    (native,) = decodes(before[: -len(PREFILL_ROWS)])
    unpatched = recorder.mean_active(native, rows=IN_FLIGHT)
    assert unpatched == pytest.approx(recorder.expected_active(lab.experts, lab.top_k, IN_FLIGHT), rel=0.06)

    applied = surgeon("apply", "oea", "--k0", str(K0), "--host", "lab", "--yes", "--json")
    assert applied.code == 0, applied.stdout + applied.stderr
    assert applied.result["status"] == "applied"
    assert applied.result["live"] is True
    assert applied.result["gate"] == {"by": "forward-mode", "why": ""}
    assert [g["name"] for g in applied.result["gates"] if not g["passed"]] == []
    assert {"beacons", "smoke"} <= {g["name"] for g in applied.result["gates"]}
    assert applied.result["unpatched"]["output_tok_s"] > 0
    pids = [r["pid"] for r in surgeon("status", "--host", "lab", "--json").result["ranks"]]

    each_k0_thins_out_by_the_formula(lab)
    assert text(lab) == said, "off"

    change("--on", "--k0", str(OTHERS[-1]))
    assert text(lab) == said, "one row"
    prefill_is_routed_as(lab, before[-len(PREFILL_ROWS) :])

    change("--k0", str(lab.top_k))
    assert text(lab) == said, "k0 = k"
    status = surgeon("status", "--host", "lab", "--json").result
    assert status["state"]["state"] == "live"
    assert [r["pid"] for r in status["ranks"]] == pids
    assert (status["in_force"]["k0"], status["differs"]) == (lab.top_k, "")

    back = surgeon("rollback", "--host", "lab", "--yes", "--json")
    assert back.code == 0, back.stdout + back.stderr
    assert [path.read_bytes() for path in cut_files(lab)] == originals
    assert back.result["sha256"] == hashlib.sha256(originals[0]).hexdigest()
    for path in cut_files(lab):
        assert not [*path.parent.glob("_surgeon*"), *path.parent.glob(".*surgeon*")]
    (native,) = decodes(record(lab, lambda: decode(lab, SEEDS[:1])))
    assert recorder.mean_active(native, rows=IN_FLIGHT) == pytest.approx(unpatched, rel=0.06)
