"""The runtime against the functions that choose experts in real sglang releases: same experts, same weights."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.wheels import definition, member

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

GROUPED = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
GLM = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
FUSED = {"num_fused_shared_experts": 1, "routed_scaling_factor": 2.5}
SCALED = {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}
# The function of topk.py, whether it adds a bias, and what select_experts has in its variables then.
LEAVES = [
    ("biased_grouped_topk_impl", True, GLM),
    ("biased_grouped_topk_impl", True, {**GLM, **FUSED}),
    ("biased_grouped_topk_impl", True, {**GROUPED, **FUSED, **SCALED}),
    ("kimi_k2_biased_topk_impl", True, {**GLM, **SCALED}),
    ("grouped_topk_gpu", False, GROUPED),
    ("grouped_topk_gpu", False, {**GROUPED, **FUSED, **SCALED}),
    ("grouped_topk_gpu", False, {**GROUPED, "renormalize": False}),
    ("fused_topk_torch_native", False, {}),
    ("fused_topk_torch_native", False, {"renormalize": False}),
    ("fused_topk_torch_native", False, {"scoring_func": "sigmoid"}),
    ("fused_topk_torch_native", True, {"scoring_func": "sigmoid"}),
]


def leaf(version: str, name: str) -> Callable[..., Any]:
    """One function of a release's topk.py, without its torch.compile decorator, alone with torch."""
    source = member(version)
    wanted = [definition(source, name)]
    if b"def fused_shared_expert_weight" in source:
        wanted.append(definition(source, "fused_shared_expert_weight"))
    for function in wanted:
        function.decorator_list.clear()
    future = ast.parse("from __future__ import annotations").body
    space: dict[str, Any] = {
        "torch": torch,
        "topk_ids_logical_to_physical": lambda ids, _: ids,
        "_mask_topk_ids_padded_region": lambda _ids, _count: None,
        "_RENORMALIZE_SUM_EPSILON": 1e-20,
        "_use_aiter": False,
    }
    exec(compile(ast.Module([*future, *wanted], []), "topk.py", "exec"), space)  # noqa: S102 - sglang's own code
    found: Callable[..., Any] = space[name]
    return found


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
@pytest.mark.parametrize(("name", "biased", "variables"), LEAVES)
def test_chooses_and_weighs_as_the_release_does(
    *, version: str, name: str, biased: bool, variables: dict[str, Any], load: Callable[..., ModuleType]
) -> None:
    """Rows that agree have nothing to share, so rows whose experts were exchanged must get sglang's back."""
    numbers = torch.Generator().manual_seed(7)
    shared = variables.get("num_fused_shared_experts", 0)
    bias = (torch.rand(256, generator=numbers) - 0.5) if biased else None
    choose = leaf(version, name)
    for _ in range(20):
        logits = torch.randn(1, 256, generator=numbers).repeat(4, 1)
        asked = {
            "hidden_states": logits,
            "gating_output": logits,
            "topk": 8 + shared,
            "renormalize": True,
            "correction_bias": bias,
            **variables,
        }
        weights, ids = choose(**{key: asked[key] for key in inspect.signature(choose).parameters if key in asked})
        spoiled = ids.clone()
        for column in (0, 1):  # at least one of two is among the row's best seven, whatever the order
            group = int(ids[0, column]) // 32 * 32
            taken = set(ids[0].tolist()) | set(spoiled[0].tolist())
            spoiled[:, column] = next(expert for expert in range(group, group + 32) if expert not in taken)
        new_weights, routed = load(k0=7).route(
            weights, spoiled, logits, top_k=8 + shared, correction_bias=bias, **variables
        )
        expected = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
        for row, weighed in zip(routed.tolist(), new_weights.tolist(), strict=True):
            assert dict(zip(row, weighed, strict=True)) == pytest.approx(expected, abs=1e-6)
