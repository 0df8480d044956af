"""What the operator promises beyond equality with the reference: how many experts wake, ties, shapes, and when not."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

PATCH = Path(__file__).parents[3] / "patches" / "oea"


def batch(rows: int, experts: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, ids and logits of a softmax model, as sglang's own top-k leaves them."""
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))
    weights, ids = logits.softmax(-1).topk(k)
    return weights / weights.sum(-1, keepdim=True), ids.int(), logits


@pytest.mark.parametrize(
    ("experts", "rows", "k0"), [(128, 16, 4), (256, 16, 4), (256, 32, 3), (160, 8, 5), (256, 64, 4)]
)
def test_wakes_as_many_experts_as_uniform_routing_predicts(
    experts: int, rows: int, k0: int, load: Callable[..., ModuleType]
) -> None:
    """Over random batches the mean number of distinct experts is E (1 - (1 - k0/E)^B), to 2 %."""
    route = load(k0=k0).route
    counts = [route(*batch(rows, experts, 8, seed), top_k=8)[1].unique().numel() for seed in range(120)]
    expected = experts * (1 - (1 - k0 / experts) ** rows)
    assert sum(counts) / len(counts) == pytest.approx(expected, rel=0.02)


def test_wakes_only_the_rows_own_best(load: Callable[..., ModuleType]) -> None:
    """Every expert of a re-routed batch is among some row's k0 best, and every row has k distinct ones."""
    weights, ids, logits = batch(16, 256, 8)
    _, routed = load(k0=4).route(weights, ids, logits, top_k=8)
    assert set(routed.flatten().tolist()) == set(ids[:, :4].flatten().tolist())
    assert all(len(set(row)) == 8 for row in routed.tolist())


def test_ties_go_to_the_lower_id(load: Callable[..., ModuleType]) -> None:
    """Where all scores are equal, the rows' own experts are the lowest ids, whatever the kernel picked."""
    logits = torch.zeros(4, 64)
    ids = torch.arange(60, 64, dtype=torch.int32).repeat(4, 1)
    _, routed = load(k0=2).route(torch.full((4, 4), 0.25), ids, logits, top_k=4)
    assert routed.tolist() == [[0, 1, 2, 3]] * 4


def test_a_row_that_wakes_nothing_new_keeps_the_kernels_choice_among_ties(load: Callable[..., ModuleType]) -> None:
    """Row 0's kernel chose expert 9 where 8 scores the same; both are awake, so the row stays bit for bit."""
    logits = torch.full((3, 16), -9.0)
    logits[0, 0], logits[0, 8], logits[0, 9] = 5.0, 3.0, 3.0
    logits[1, 8], logits[1, 1] = 5.0, 3.0
    logits[2, 9], logits[2, 2] = 5.0, 3.0
    ids = torch.tensor([[9, 0], [8, 1], [9, 2]])
    weights = torch.tensor([[0.3, 0.7]] * 3)
    new_weights, routed = load(k0=1).route(weights, ids, logits, top_k=2)
    assert routed[0].tolist() == [9, 0]
    assert new_weights[0].tolist() == weights[0].tolist()
    assert routed[1].tolist() == [8, 0]


def test_close_scores_keep_their_order_under_a_large_bias(operator: ModuleType) -> None:
    """Scores one fp32 step apart are told apart outside the base set too, next to biases of several units."""
    logits = torch.full((3, 8), -30.0)
    logits[:, 5], logits[:, 6], logits[:, 7] = -12.0, -11.999999, -12.000001
    bias = torch.zeros(8)
    bias[:2] = torch.tensor((8.0, 7.0))
    ids = torch.tensor([[0, 1, 5, 7]] * 3)
    ids[:, 0] = 2  # as if the kernel had missed the base set, so that every row is routed anew
    policy = torch.tensor(operator.pack(operator.Policy(((1, 64, 1),))))
    rule = operator.Rule(k=4, scoring="sigmoid")
    _, routed, changed = operator.reroute(torch.ones(3, 4), ids, logits, bias, policy, None, rule)
    assert changed.all()
    assert routed.tolist() == [[0, 1, 6, 5]] * 3


def test_a_row_stays_in_the_groups_that_the_kernel_took_among_equals(load: Callable[..., ModuleType]) -> None:
    """All groups score the same and the kernel took the last ones: its picks show which, and the row stays there."""
    logits = torch.zeros(3, 16)
    logits[:, 3::4] = 1.0  # the best expert of each of four groups
    ids = torch.tensor([[15, 11, 14], [15, 11, 14], [15, 11, 8]])
    names = {"use_grouped_topk": True, "correction_bias": torch.zeros(16), "num_expert_group": 4, "topk_group": 2}
    _, routed = load(k0=2).route(torch.ones(3, 3), ids, logits, top_k=3, **names)
    # Base set 11 and 15, all of it in the kernel's rows already.
    assert routed.tolist() == ids.tolist()
    ids[:, 1] = 12  # now the rows show one group only; the other is the lowest of the equals
    _, routed = load(k0=2).route(torch.ones(3, 3), ids, logits, top_k=3, **names)
    assert routed[0].tolist() == [3, 15, 0]


def test_a_last_column_that_holds_no_shared_expert_is_left_alone(load: Callable[..., ModuleType]) -> None:
    """Releases differ on who appends shared experts; a routed id in their place could repeat, so such rows stay."""
    weights, ids, logits = batch(16, 64, 9)
    _, routed = load(k0=2).route(weights, ids, logits, top_k=9, num_fused_shared_experts=1)
    assert torch.equal(routed, ids)
    ids[:, 8] = 64
    _, routed = load(k0=2).route(weights, ids, logits, top_k=9, num_fused_shared_experts=1)
    assert not torch.equal(routed, ids)
    assert routed[:, 8].tolist() == [64] * 16


def test_of_several_copies_of_the_shared_expert_a_row_takes_one(load: Callable[..., ModuleType]) -> None:
    """Up to 0.4.6.post5 the number of copies is given, not that of columns: each row's last column is one of them."""
    weights, ids, logits = batch(16, 64, 9)
    ids[:, 8] = 64 + torch.arange(16) % 8
    _, routed = load(k0=2).route(weights, ids, logits, top_k=9, use_grouped_topk=True, n_share_experts_fusion=8)
    assert torch.equal(routed[:, 8], ids[:, 8])
    assert not torch.equal(routed[:, :8], ids[:, :8])
    assert routed[:, :8].max() < 64


def grouped_names() -> dict[str, Any]:
    """A call as a group-limited model with a shared expert makes it."""
    return {
        "top_k": 9,
        "use_grouped_topk": True,
        "correction_bias": torch.linspace(-1, 1, 64),
        "num_expert_group": 8,
        "topk_group": 4,
        "num_fused_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "apply_routed_scaling_factor_on_output": True,
        "layer_id": 3,
    }


def shared_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch with one shared expert in the last column."""
    weights, ids, logits = batch(16, 64, 8)
    return (
        torch.cat((weights, torch.ones(16, 1)), dim=1),
        torch.cat((ids, torch.full((16, 1), 64, dtype=torch.int32)), dim=1),
        logits,
    )


def test_traces_as_one_graph_for_any_number_of_rows(load: Callable[..., ModuleType]) -> None:
    """torch.compile takes route whole (fullgraph), with rows dynamic, and gives what eager gives."""
    route = load(k0=4).route
    names = grouped_names()
    compiled = torch.compile(route, fullgraph=True, dynamic=True, backend="eager")
    weights, ids, logits = shared_batch()
    for rows in (16, 7, 2):
        given = (weights[:rows], ids[:rows], logits[:rows])
        for found, expected in zip(compiled(*given, **names), route(*given, **names), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("refill", ["native", "strict"])
def test_needs_no_number_from_the_device(refill: str, load: Callable[..., ModuleType]) -> None:
    """On tensors without data, where reading one back or a shape that depends on one raises, route runs through."""
    given, names = shared_batch(), grouped_names()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in given]
        names["correction_bias"] = mode.from_tensor(names["correction_bias"])
        names["num_token_non_padded"] = mode.from_tensor(torch.tensor(9))
        weights, ids = load(k0=4, refill=refill).route(*fake, **names)
    assert (weights.shape, ids.shape) == (given[0].shape, given[1].shape)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize(("rows", "touched"), [(2, False), (3, True), (64, True), (65, False)])
def test_decode_is_told_by_the_number_of_rows(rows: int, touched: bool, load: Callable[..., ModuleType]) -> None:  # noqa: FBT001 - a table
    """By default passes of 3 to 64 rows are re-routed; others get the very tensors back."""
    weights, ids, logits = batch(rows, 256, 8)
    new_weights, routed = load(k0=4).route(weights, ids, logits, top_k=8)
    assert (routed is ids, new_weights is weights) == (not touched, not touched)
    assert torch.equal(routed, ids) == (not touched)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"custom_routing_function": len}, "custom routing function"),
        ({"packed_topk": torch.zeros(1)}, "packed"),
        ({"expert_location_dispatch_info": object()}, "physical"),
        ({"dynamic_expert_bias": torch.zeros(16, 64)}, "bias per token"),
        ({"routing_overridden": True}, "simulates"),
        ({"scoring_func": "logistic"}, "scoring function"),
        ({"use_grouped_topk": True, "scoring_func": "sigmoid"}, "grouped top-k without softmax or a bias"),
        ({"correction_bias": torch.zeros(64)}, "softmax with a bias"),
        ({"use_grouped_topk": True, "correction_bias": torch.zeros(64), "renormalize": False}, "not renormalised"),
        (
            {"renormalize": False, "routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True},
            "scaled but not",
        ),
        ({"top_k": 7}, "number of top-k columns"),
        ({"scoring_func": "sigmoid", "correction_bias": torch.zeros(63)}, "bias of an unexpected shape"),
        ({"use_grouped_topk": True, "num_expert_group": 7, "topk_group": 2}, "groups"),
        ({"use_grouped_topk": True, "num_expert_group": 16, "topk_group": 1}, "groups"),
        ({"top_k": 4}, "k0 is not below"),
    ],
)
def test_what_it_does_not_understand_it_leaves_alone(
    names: dict[str, Any], reason: str, load: Callable[..., ModuleType]
) -> None:
    """Each case that routes in a way that releases or kernels disagree on is handed back, and the beacon says why."""
    serial = int(hashlib.sha256(repr(sorted(names)).encode() + reason.encode()).hexdigest()[:8], 16)
    runtime = load(k0=4, generation=serial)  # a process that has seen nothing else
    given = batch(16, 64, 8)
    weights, ids = runtime.route(*given, **{"top_k": 8, **names})
    assert weights is given[0]
    assert ids is given[1]
    beacon = json.loads((Path(str(runtime.__file__)).parent / "beacons" / f"{os.getpid()}.json").read_text())
    assert reason in beacon["skipped"]
    assert beacon["applied"] is False


def test_the_description_and_the_runtime_agree(load: Callable[..., ModuleType]) -> None:
    """patch.toml's version, wanted names, settings, defaults and ranges are those of the code it ships."""
    about = tomllib.loads((PATCH / "patch.toml").read_text())
    runtime = load(k0=4)
    assert (about["name"], about["version"]) == (runtime.PATCH, runtime.PATCH_VERSION)
    names = [name for name, p in inspect.signature(runtime.route).parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert sorted(about["target"]["wants"]) == sorted(names)
    assert isinstance(getattr(runtime, about["target"]["flag"]), bool)
    settings = runtime._settings
    defaults = {key: spec["default"] for key, spec in about["settings"].items()}
    mine = settings.Settings()._asdict()
    assert defaults == {key: list(mine[key]) if isinstance(mine[key], tuple) else mine[key] for key in defaults}
    assert set(mine) - set(defaults) == {"generation", "at_pass", "beacon_dir"}
    for key, spec in about["settings"].items():
        if spec["type"] == "int":
            assert (spec["min"], spec["max"]) == settings.INTEGERS[key]
        elif spec["type"] == "choice":
            assert tuple(spec["choices"]) == settings.CHOICES[key]
        elif spec["type"] == "float":
            assert (spec["min"], spec["max"]) == (settings.LEAST_P, settings.MOST_P)
    assert set(about["modules"].values()) | {"runtime.py"} == {path.name for path in PATCH.glob("*.py")}


def test_is_written_for_python_3_8() -> None:
    """Every file parses as Python 3.8, and one holds the place for the patch's hash exactly once."""
    for path in PATCH.glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 8))
    assert (PATCH / "runtime.py").read_text().count('PATCH_HASH = "unset"') == 1
