"""The grafted select_experts of real sglang releases, run whole: but for decode, it is the original."""

from __future__ import annotations

import random
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from surgeon.surgery import GraftSpec, graft
from tests.support.passes import DRAFT, TARGET, Mode, batch_of
from tests.support.wheels import member, runnable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.wheels
ABOUT = tomllib.loads((Path(__file__).parents[3] / "patches" / "oea" / "patch.toml").read_text())
WANTS = tuple(ABOUT["target"]["wants"])
RELEASES = ("0.5.9", "0.5.23")
FAMILIES: dict[str, dict[str, Any]] = {
    "glm": {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "correction_bias": True},
    "deepseek": {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4, "correction_bias": True},
    "deepseek fused": {
        "use_grouped_topk": True,
        "num_expert_group": 8,
        "topk_group": 4,
        "correction_bias": True,
        "shared": 1,
        "routed_scaling_factor": 2.5,
        "apply_routed_scaling_factor_on_output": True,
    },
    "qwen": {"use_grouped_topk": False, "torch_native": True},
}


class StandardTopKOutput(NamedTuple):
    """What select_experts returns."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class Config(SimpleNamespace):
    """A TopKConfig; what a release asks for and the model does not say is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Off:
    """sglang's environment switches, none of them set."""

    def __getattr__(self, _: str) -> Any:
        return SimpleNamespace(get=lambda: False)


def config(family: str) -> tuple[Config, int]:
    """The model, and how many shared experts are fused in."""
    asked: dict[str, Any] = dict(FAMILIES[family])
    shared = asked.pop("shared", 0)
    bias = (
        (torch.rand(64, generator=torch.Generator().manual_seed(3)) - 0.5) if asked.pop("correction_bias", 0) else None
    )
    return (
        Config(
            **{
                "top_k": 6 + shared,
                "renormalize": True,
                "scoring_func": "softmax",
                "correction_bias": bias,
                "num_fused_shared_experts": shared,
                "num_shared_topk_slots": shared,
                "apply_routed_scaling_factor_on_output": False,
                **asked,
            }
        ),
        shared,
    )


@cache
def sources(version: str) -> tuple[bytes, bytes]:
    """A release's topk.py, as it is and grafted as surgeon grafts it."""
    source = member(version)
    return source, graft(source, GraftSpec("oea", ABOUT["version"], "0123456789ab", wants=WANTS)).result


def _as_they_are(router_logits: Any, correction_bias: Any, info: Any) -> tuple[Any, Any]:  # noqa: ARG001 - sglang's names
    return router_logits, correction_bias


def select_experts(version: str, *, grafted: ModuleType | None = None) -> Callable[..., StandardTopKOutput]:
    """A release's select_experts with its own torch routing functions; everything of a GPU or other ranks is absent."""
    source = sources(version)[grafted is not None]
    leaves = {"biased_grouped_topk_impl", "fused_topk_torch_native", "grouped_topk_gpu"}
    if b"def fused_shared_expert_weight" in source:
        leaves.add("fused_shared_expert_weight")
    absent = SimpleNamespace(on_select_experts=lambda **_: None, capture=lambda **_: None)
    known: dict[str, Any] = {
        "torch": SimpleNamespace(**{**vars(torch), "compile": lambda *_, **__: lambda function: function}),
        "get_compiler_backend": lambda: "eager",
        "topk_ids_logical_to_physical": lambda ids, _: ids,
        "_mask_topk_ids_padded_region": lambda _ids, _count: None,
        "_RENORMALIZE_SUM_EPSILON": 1e-20,
        "_use_aiter": False,
        "_is_cpu": True,
        "_is_xpu": False,
        "_is_cuda": False,
        "envs": Off(),
        "has_per_rank_fused_shared_slots": lambda _: False,
        "StandardTopKOutput": StandardTopKOutput,
        "expert_location_dispatch": SimpleNamespace(transform_select_experts_inputs=_as_they_are),
        "transform_select_experts_inputs": _as_they_are,
        "_post_process_topk_ids": lambda topk_ids, topk_weights, **_: (topk_ids, topk_weights, None),
        "get_global_expert_distribution_recorder": lambda: absent,
        "get_global_experts_capturer": lambda: absent,
        "_surgeon_oea": grafted,
    }
    space = runnable(source, {"select_experts", *leaves}, random.Random(0), known)  # noqa: S311 - tosses no coin here
    functions = space.select_experts.__globals__
    functions["biased_grouped_topk"] = space.biased_grouped_topk_impl
    functions["grouped_topk"] = space.grouped_topk_gpu
    functions["fused_topk_native"] = space.fused_topk_torch_native
    found: Callable[..., StandardTopKOutput] = space.select_experts
    return found


def layer(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and router logits."""
    numbers = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=numbers), torch.randn(rows, 64, generator=numbers)


def same(one: StandardTopKOutput, other: StandardTopKOutput) -> bool:
    """Whether two outputs are the same bits in the same dtypes."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("family", FAMILIES)
class TestRelease:
    """One release, one family of models."""

    def test_off_and_native_passes_are_the_original_bit_for_bit(
        self, version: str, family: str, fresh: Callable[..., ModuleType]
    ) -> None:
        """Off, k0 = k, prefill, mixed, idle, drafts, rows out of range: the ungrafted function's very numbers."""
        model, _ = config(family)
        original = select_experts(version)
        runtime = fresh(k0=2)
        grafted = select_experts(version, grafted=runtime)
        for runner, mode, rows in (
            (TARGET, Mode.EXTEND, 8),
            (TARGET, Mode.MIXED, 8),
            (TARGET, Mode.IDLE, 8),
            (DRAFT, Mode.DECODE, 8),
            (TARGET, Mode.DECODE, 2),
            (TARGET, Mode.DECODE, 65),
        ):
            runtime.announce(runner, batch_of(mode, rows))
            assert same(grafted(*layer(rows), model), original(*layer(rows), model))
        for asked in ({"k0": 6}, {"enabled": False}, {"k0": 0}):
            runtime = fresh(**asked)
            grafted = select_experts(version, grafted=runtime)
            runtime.announce(TARGET, batch_of(Mode.DECODE, 8))
            assert same(grafted(*layer(8), model), original(*layer(8), model))

    def test_decode_is_rerouted_inside_the_rows_own_best(
        self, version: str, family: str, fresh: Callable[..., ModuleType]
    ) -> None:
        """In decode the same call loads what the rows' three best make up; shared columns and sums of weights stay."""
        model, shared = config(family)
        runtime = fresh(k0=3)
        grafted, original = select_experts(version, grafted=runtime), select_experts(version)
        for mode in (Mode.DECODE, Mode.TARGET_VERIFY):
            runtime.announce(TARGET, batch_of(mode, 16))
            before, after = original(*layer(16), model), grafted(*layer(16), model)
            scores = layer(16)[1]
            if model.correction_bias is not None:
                scores = scores.sigmoid() + model.correction_bias
            ranked = before.topk_ids[:, :6].gather(
                1, scores.gather(1, before.topk_ids[:, :6].long()).argsort(1, descending=True)
            )
            base = set(ranked[:, :3].flatten().tolist())
            assert len(base) < len(set(before.topk_ids[:, :6].flatten().tolist()))
            assert base <= set(after.topk_ids[:, :6].flatten().tolist())
            if model.num_expert_group != 8:
                assert base == set(after.topk_ids[:, :6].flatten().tolist())
            assert torch.equal(after.topk_ids[:, 6:], before.topk_ids[:, 6:])
            assert torch.equal(after.topk_weights[:, 6:], before.topk_weights[:, 6:])
            assert after.topk_ids.shape[1] == 6 + shared
            assert torch.allclose(after.topk_weights[:, :6].sum(1), before.topk_weights[:, :6].sum(1), rtol=1e-5)
            assert (after.topk_ids.dtype, after.topk_weights.dtype) == (
                before.topk_ids.dtype,
                before.topk_weights.dtype,
            )
