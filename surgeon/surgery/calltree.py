"""Who calls whom in topk.py, as a tree to read, and which of it a server runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.surgery.functions import DISPATCHER, POST_PROCESSING, Function, Imported
from surgeon.surgery.outcomes import FUNCTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Branch:
    """One function in the tree.

    Attributes:
        item: the function.
        to: the dispatchers that it hands over to, which have branches of their own.
        below: what else it calls, in the order in which it names it.
        above: it was met before; what it calls is shown there.
    """

    item: Function | Imported
    to: tuple[str, ...] = ()
    below: tuple[Branch, ...] = ()
    above: bool = False


def call_tree(functions: Sequence[Function], *, everything: bool = False) -> tuple[Branch, ...]:
    """The map as a tree.

    Args:
        functions: the map.
        everything: with the post-processing inside the functions that select, which every one of them did up to
            0.5.9; without, only where `select_experts` does it.

    Returns:
        A branch for each dispatcher, `select_experts` last of them, then one for each function that nothing else in
        the file calls.
    """
    return _Grower(functions, everything=everything).grow()


class _Grower:
    def __init__(self, functions: Sequence[Function], *, everything: bool) -> None:
        self._functions = functions
        self._named = {function.name: function for function in functions}
        self._everything = everything
        self._met: set[str] = set()

    def grow(self) -> tuple[Branch, ...]:
        called = {name for function in self._functions for name in function.calls}
        dispatchers = [f for f in self._functions if f.role == DISPATCHER and f.name != FUNCTION]
        chosen = [f for f in self._functions if f.name == FUNCTION]
        rest = [f for f in self._functions if f.role != DISPATCHER and f.name not in called]
        return tuple(self._branch(function) for function in (*dispatchers, *chosen, *rest))

    def _branch(self, function: Function) -> Branch:
        if function.name in self._met:
            return Branch(function, above=bool(function.called))
        self._met.add(function.name)
        called = [self._named[one] if isinstance(one, str) else one for one in function.called]
        to = tuple(one.name for one in called if _hands_over(one))
        within = function.role in {DISPATCHER, POST_PROCESSING} or self._everything
        shown = [one for one in called if not _hands_over(one) and (within or one.role != POST_PROCESSING)]
        below = tuple(self._branch(one) if isinstance(one, Function) else Branch(one) for one in shown)
        return Branch(function, to, below)


def _hands_over(item: Function | Imported) -> bool:
    return item.role == DISPATCHER


# Whether a model asks for grouped top-k, which it does with a correction bias: `use_grouped_topk` in sglang 0.5.1 to
# 0.5.23, srt/models/deepseek_v2.py, glm4_moe.py and qwen3_moe.py.
_BRANCH = {
    "DeepseekV3ForCausalLM": "biased_grouped_topk",
    "DeepseekV32ForCausalLM": "biased_grouped_topk",
    "GlmMoeDsaForCausalLM": "biased_grouped_topk",
    "Glm4MoeForCausalLM": "biased_grouped_topk",
    "Qwen3MoeForCausalLM": "fused_topk",
}


def live(
    functions: Sequence[Function], leaf: str | None, device: str | None, architecture: str | None = None
) -> frozenset[str]:
    """Which functions of the map a server surely runs when its routing goes through `select_experts`.

    Args:
        functions: the map.
        leaf: the function that selects, as the live path names it; None if that is not certain.
        device: "cuda", "cpu", ... if known: it chooses the method of `TopK` that is called.
        architecture: the model class, if known: it chooses the branch of `select_experts`.

    Returns:
        Their names: `select_experts`, what post-processes in it, and what lies on every way from it to the leaf.
        The leaf itself is not among them if it is imported from elsewhere.
    """
    named = {function.name: function for function in functions}
    if FUNCTION not in named:
        return frozenset()
    found = {FUNCTION} | {name for name in named[FUNCTION].calls if name.startswith("_post_process_")}
    words = leaf_words(leaf)
    ways = list(_ways(named, FUNCTION, words, ())) if leaf else []
    branch = _BRANCH.get(architecture or "")
    if branch is not None:
        ways = [way for way in ways if way[1:] and way[1].startswith(branch)] or ways
    if ways:
        found |= frozenset.intersection(*(frozenset(way) for way in ways))
    return frozenset(found | ({_method(device, words)} & set(named)))


def _method(device: str | None, words: frozenset[str]) -> str:
    """The method of `TopK` that a device calls; on a CPU, the leaf tells whether sgl_kernel's AMX kernels are there.

    Source: sglang 0.5.9 srt/layers/utils/multi_platform.py MultiPlatformOp.dispatch_forward, 0.4.10 srt/custom_op.py.
    """
    if device != "cpu":
        return f"TopK.forward_{device}"
    if not words:
        return ""
    return "TopK.forward_cpu" if any(word.endswith("_cpu") for word in words) else "TopK.forward_native"


def leaf_words(leaf: str | None) -> frozenset[str]:
    """The identifiers in a leaf's name: `sgl_kernel.topk_softmax` is `topk_softmax` of `sgl_kernel`."""
    return frozenset(re.findall(r"\w+", leaf or ""))


# Where a leaf comes from that is named with this word: `moe_fused_gate` is a kernel of three packages.
_ORIGINS = {
    "Triton": ("sglang.",),
    "JIT": ("sglang.",),
    "sgl_kernel": ("sgl_kernel", "torch.ops.sgl_kernel"),
    "flashinfer": ("flashinfer",),
}


def is_leaf(item: Function | Imported, words: frozenset[str]) -> bool:
    """Whether a function is the one that a live path names.

    Args:
        item: the function.
        words: from `leaf_words`.
    """
    if item.name not in words:
        return False
    origins = tuple(prefix for word in words for prefix in _ORIGINS.get(word, ()))
    return isinstance(item, Function) or not origins or any(module.startswith(origins) for module in item.modules)


def _ways(
    named: dict[str, Function], at: str, words: frozenset[str], behind: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    function = named[at]
    way = (*behind, at)
    if is_leaf(function, words) or any(is_leaf(one, words) for one in function.imported):
        yield way
        return
    for name in function.calls:
        if name not in way:
            yield from _ways(named, name, words, way)
