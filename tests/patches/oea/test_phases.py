"""Which passes are re-routed: decode and verify as sglang announces them, and no other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.passes import DRAFT, TARGET, Mode, batch_of, modes_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

RELEASES = ("0.4.6", "0.4.9", "0.5.1", "0.5.9", "0.5.14", "0.5.18", "0.5.23")


def layer(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a layer of 64 experts with 6 chosen has at the grafted line."""
    logits = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    weights, ids = logits.softmax(-1).topk(6)
    return weights / weights.sum(-1, keepdim=True), ids.int(), logits


def touched(runtime: ModuleType, rows: int) -> bool:
    """Whether route changes such a batch; if not, it must hand back the very tensors."""
    weights, ids, logits = layer(rows)
    new_weights, new_ids = runtime.route(weights, ids, logits, top_k=6)
    if new_ids is ids:
        assert new_weights is weights
        return False
    assert not torch.equal(new_ids, ids)
    return True


def beacon(runtime: ModuleType) -> Any:
    """What the runtime's beacon says."""
    return json.loads((Path(str(runtime.__file__)).parent / "beacons" / f"{os.getpid()}.json").read_text())


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
def test_only_decode_and_verify_of_a_release_are_touched(version: str, fresh: Callable[..., ModuleType]) -> None:
    """Of all forward modes that a release has, these two are re-routed, in whatever order passes come."""
    runtime = fresh(k0=2)
    modes = list(modes_of(version))
    for mode in [*modes, *reversed(modes)]:
        runtime.announce(TARGET, batch_of(mode, 8))
        assert touched(runtime, 8) == (mode.name in {"DECODE", "TARGET_VERIFY"}), mode.name


@pytest.mark.parametrize("rows", [5, 8, 11, 33, 64])
def test_a_prefill_of_a_few_tokens_is_left_alone(rows: int, fresh: Callable[..., ModuleType]) -> None:
    """Short prefills and last chunks are in the range of rows and are no decode; decode next to them is touched."""
    runtime = fresh(k0=2)
    for mode in (Mode.EXTEND, Mode.MIXED):
        runtime.announce(TARGET, batch_of(mode, rows, batch_size=1))
        assert not touched(runtime, rows)
        runtime.announce(TARGET, batch_of(Mode.DECODE, rows))
        assert touched(runtime, rows)


def test_drafts_are_left_alone(fresh: Callable[..., ModuleType]) -> None:
    """A draft worker's decode is native, does not count as a pass, and the target's verify after it is re-routed."""
    runtime = fresh(k0=2)
    runtime.announce(TARGET, batch_of(Mode.DECODE, 8))
    runtime.announce(DRAFT, batch_of(Mode.DECODE, 8))
    assert not touched(runtime, 8)
    assert runtime._NOW.number == 1
    runtime.announce(TARGET, batch_of(Mode.TARGET_VERIFY, 32, batch_size=8))
    assert touched(runtime, 32)


def test_verify_passes_can_be_left_alone(fresh: Callable[..., ModuleType]) -> None:
    """With verify off only decode is re-routed."""
    runtime = fresh(k0=2, verify=False)
    runtime.announce(TARGET, batch_of(Mode.TARGET_VERIFY, 32, batch_size=8))
    assert not touched(runtime, 32)
    runtime.announce(TARGET, batch_of(Mode.DECODE, 8))
    assert touched(runtime, 8)


def test_data_parallel_attention_is_left_alone(fresh: Callable[..., ModuleType]) -> None:
    """Where layers see the tokens of several ranks, the count of this one's says nothing."""
    runtime = fresh(k0=2)
    runtime.announce(TARGET, batch_of(Mode.DECODE, 8, global_num_tokens_cpu=[8, 8]))
    assert not touched(runtime, 16)
    assert "data-parallel attention" in beacon(runtime)["skipped"]


@pytest.mark.parametrize("broken", [None, SimpleNamespace(), batch_of(None, 8), batch_of(Mode.DECODE, 8, input_ids=[])])
def test_a_pass_that_cannot_be_judged_is_left_alone(broken: Any, fresh: Callable[..., ModuleType]) -> None:
    """Whatever a release calls things, nothing is raised into the server."""
    runtime = fresh(k0=2)
    runtime.announce(TARGET, batch_of(Mode.DECODE, 8))
    assert touched(runtime, 8)
    runtime.announce(TARGET, broken)
    assert not touched(runtime, 8)
    assert int(runtime._NOW.real_rows) == 0


def test_without_announced_passes_the_number_of_rows_decides(fresh: Callable[..., ModuleType]) -> None:
    """A server that the second graft does not fit goes by rows, and says so; the first announced pass ends that."""
    runtime = fresh(k0=2)
    assert [touched(runtime, rows) for rows in (2, 3, 64, 65)] == [False, True, True, False]
    assert beacon(runtime)["gate"] == "row-count"
    runtime.announce(TARGET, batch_of(Mode.EXTEND, 8))
    assert not touched(runtime, 8)
    runtime._JOURNAL.write()
    told = beacon(runtime)
    assert (told["gate"], told["phase"], told["pass"]) == ("forward-mode", "forward mode EXTEND", 1)


def test_padded_rows_of_an_eager_pass_have_no_say(fresh: Callable[..., ModuleType]) -> None:
    """Five tokens in a batch of eight rows route as five alone, and the other rows stay."""
    runtime = fresh(k0=2)
    weights, ids, logits = layer(8)
    runtime.announce(TARGET, batch_of(Mode.DECODE, 5))
    found = runtime.route(weights, ids, logits, top_k=6)
    alone = runtime.route(weights[:5], ids[:5], logits[:5], top_k=6)
    for padded, single, before in zip(found, alone, (weights, ids), strict=True):
        assert torch.equal(padded[:5], single)
        assert torch.equal(padded[5:], before[5:])
    assert not torch.equal(alone[1], ids[:5])


def test_the_schedule_goes_by_the_tokens_of_the_pass(fresh: Callable[..., ModuleType]) -> None:
    """k0 by range: native at 1 and 2 rows, then falling; above the last range nothing is touched."""
    runtime = fresh(k0_schedule=[[1, 2, 6], [3, 4, 5], [5, 8, 3], [9, 20, 1]])
    woken = {}
    for rows in (2, 4, 8, 20, 21):
        weights, ids, logits = layer(rows)
        runtime.announce(TARGET, batch_of(Mode.DECODE, rows))
        routed = runtime.route(weights, ids, logits, top_k=6)[1]
        k0 = runtime._NOW.k0(rows)
        own = set(logits.topk(max(k0, 1)).indices.flatten().tolist())
        woken[rows] = (k0, routed is ids, len(set(routed.flatten().tolist()) - own) if k0 > 0 else None)
    assert woken == {2: (6, True, 0), 4: (5, False, 0), 8: (3, False, 0), 20: (1, False, 0), 21: (-1, True, None)}
