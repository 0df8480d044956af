"""The map of the functions that choose experts, held against what Python's compiler sees in real releases."""

from __future__ import annotations

import ast
import dis
import functools
import types
from typing import TYPE_CHECKING

import pytest

from surgeon.surgery.calltree import Branch, call_tree, is_leaf, leaf_words, live
from surgeon.surgery.functions import Function, functions
from tests.support.wheels import member

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.wheels

# The first and the last release of each family of topk.py, and those between that brought or dropped a kernel.
RELEASES = (
    *("0.4.6", "0.4.7.post1", "0.4.8", "0.4.9", "0.4.10", "0.5.1", "0.5.5", "0.5.6", "0.5.8", "0.5.9", "0.5.10"),
    *("0.5.11", "0.5.12", "0.5.13", "0.5.15", "0.5.16", "0.5.17", "0.5.19", "0.5.21", "0.5.22", "0.5.23"),
)
# Shape stubs for torch.compile, kernels in Triton, and what prepares or applies a choice that is made elsewhere.
BESIDE = {"_", "_moe_fused_gate", "_kimi_k2_moe_fused_gate"}


@functools.cache
def mapped_in(source: bytes) -> tuple[Function, ...]:
    """The map of one release."""
    return functions(source)


@functools.cache
def code_of(source: bytes) -> dict[str, types.CodeType]:
    """Every function of a module by name, methods as `Class.method`, as the compiler leaves them."""
    found: dict[str, types.CodeType] = {}

    def enter(code: types.CodeType, owner: str) -> None:
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                is_class = "__qualname__" in inner.co_names and not inner.co_argcount
                if is_class:
                    enter(inner, f"{owner}{inner.co_name}.")
                else:
                    found.setdefault(f"{owner}{inner.co_name}", inner)

    enter(compile(source, "topk.py", "exec", dont_inherit=True), "")
    return found


def names_in(code: types.CodeType) -> set[str]:
    """Global names and attributes that a function and the functions in it use."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    loads = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"}
    own = {str(one.argval) for one in dis.get_instructions(code) if one.opname in loads}
    return own.union(*(names_in(one) for one in inner))


def walk(branches: Sequence[Branch]) -> Iterator[Branch]:
    """Every branch of a tree."""
    for branch in branches:
        yield branch
        yield from walk(branch.below)


def kernels(function: Function) -> set[str]:
    """The fused kernels that a function calls, with where they are from."""
    return {f"{'|'.join(one.modules)}:{one.name}" for one in function.imported if one.role == "fused kernel"}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> bytes:
    """topk.py of one release."""
    return member(request.param)


def test_nothing_that_selects_is_missing(release: bytes) -> None:
    """Every function that takes a top-k itself is on the map."""
    mapped = {function.name for function in mapped_in(release)}
    selecting = {name for name, code in code_of(release).items() if "topk" in code.co_names}
    assert selecting
    assert selecting - mapped - BESIDE == set()


def test_roles_are_what_the_bodies_do(release: bytes) -> None:
    """Torch paths take torch's top-k, kernel and CPU paths call a kernel, post-processing takes no top-k."""
    mapped, code = mapped_in(release), code_of(release)
    roles = {function.name: function.role for function in mapped}
    assert roles["select_experts"] == "dispatcher"
    assert {"torch path", "fused kernel path"} <= set(roles.values())
    for function in mapped:
        names = names_in(code[function.name])
        match function.role:
            case "torch path":
                assert "topk" in names, function.name
                assert not kernels(function), function.name
            case "fused kernel path":
                assert kernels(function), function.name
            case "CPU path":
                assert all(one.startswith("torch.ops.sgl_kernel:") for one in kernels(function)), function.name
                assert kernels(function), function.name
            case "post-processing" | "simulation":
                assert "topk" not in names, function.name
                assert not kernels(function), function.name
            case role:
                assert role == "dispatcher", function.name


def test_calls_are_what_the_compiler_sees(release: bytes) -> None:
    """Whom a function names, directly or by an alias of the module."""
    mapped, code = mapped_in(release), code_of(release)
    present = {function.name for function in mapped}
    aliases = {
        "biased_grouped_topk": {"biased_grouped_topk_cpu", "biased_grouped_topk_gpu"},
        "grouped_topk": {"grouped_topk_cpu", "grouped_topk_gpu", "grouped_topk_xpu"},
        "fused_topk": {"fused_topk", "fused_topk_cpu"},
        "fused_topk_native": {"fused_topk_cpu", "fused_topk_torch_native"},
    }
    for function in mapped:
        names = names_in(code[function.name])
        reached = set().union(*({name} | aliases.get(name, set()) for name in names))
        # An import inside the function hides the module's name.
        hidden = {one.name for one in function.imported} & set(code[function.name].co_varnames)
        direct = {name for name in present if name.rpartition(".")[2] in reached - hidden} - {function.name}
        if "." not in function.name:
            direct = {name for name in direct if "." not in name}
        assert set(function.calls) == direct, function.name


def test_lines_and_decorators_are_the_parsers(release: bytes) -> None:
    """Of each function that is found, and none is made up."""
    nodes = [node for node in ast.walk(ast.parse(release)) if isinstance(node, ast.FunctionDef)]
    there = {(n.name, n.lineno, n.end_lineno, *map(ast.unparse, n.decorator_list)) for n in nodes}
    for one in mapped_in(release):
        assert (one.name.rpartition(".")[2], one.line, one.end, *one.decorators) in there


_MUSA = "sglang.srt.hardware_backend.musa.kernels.topk"
SIGMOID = f"sgl_kernel|sglang.kernels.ops.moe.moe_topk_sigmoid|{_MUSA}:topk_sigmoid"
CUDA_KERNELS = {
    "0.4.6": {"sgl_kernel:moe_fused_gate"},
    "0.5.1": {"sgl_kernel:moe_fused_gate", "aiter:biased_grouped_topk"},
    "0.5.6": {"sgl_kernel:moe_fused_gate", "sgl_kernel:kimi_k2_moe_fused_gate", "aiter:biased_grouped_topk"},
    "0.5.9": {
        *("sgl_kernel:moe_fused_gate", "sgl_kernel:kimi_k2_moe_fused_gate", "aiter:biased_grouped_topk"),
        "flashinfer.fused_moe:fused_topk_deepseek",
    },
    "0.5.11": {
        *("sgl_kernel|mate:moe_fused_gate", "sgl_kernel:kimi_k2_moe_fused_gate", "aiter:biased_grouped_topk"),
        "sglang.jit_kernel.grouped_topk:grouped_topk",
    },
    "0.5.16": {
        # An import of sgl_kernel's within the function hides mate's, also where MUSA needs it.
        *("sglang.jit_kernel.moe_fused_gate:moe_fused_gate", "sgl_kernel:moe_fused_gate"),
        "sglang.jit_kernel.trtllm_lora_temp.kimi_k2_moe_fused_gate:kimi_k2_moe_fused_gate",
        "aiter:biased_grouped_topk",
        f"sgl_kernel|sglang.jit_kernel.moe_topk_sigmoid|{_MUSA}:topk_sigmoid",
    },
    "0.5.23": {
        *("sglang.kernels.ops.moe.moe_fused_gate:moe_fused_gate", "sgl_kernel:moe_fused_gate", "mate:moe_fused_gate"),
        "sglang.kernels.ops.lora.moe.trtllm_lora_temp.kimi_k2_moe_fused_gate:kimi_k2_moe_fused_gate",
        "sglang.kernels.ops.moe.moe_route_radix4:route_radix4",
        "sglang.srt.layers.moe.route_quant_handoff:try_route_quant_fused",
        "aiter:biased_grouped_topk",
        SIGMOID,
    },
}


@pytest.mark.parametrize("version", CUDA_KERNELS)
def test_kernels_come_from_where_the_file_imports_them(version: str) -> None:
    """What the grouped path with a bias can run, read by hand from each release."""
    mapped = {function.name: function for function in mapped_in(member(version))}
    grouped = mapped.get("biased_grouped_topk_gpu") or mapped["biased_grouped_topk"]
    assert kernels(grouped) == CUDA_KERNELS[version]
    torch = mapped["biased_grouped_topk_impl"]
    assert torch.compiled
    assert torch.name in grouped.calls


def test_compilation_at_the_call_is_seen() -> None:
    """Up to 0.4.9 the function is compiled where it is called, and bears no decorator."""
    mapped = {function.name: function for function in mapped_in(member("0.4.6"))}
    assert mapped["biased_grouped_topk_impl"].decorators == ()
    assert [name for name, function in mapped.items() if function.compiled] == [
        "grouped_topk",
        "biased_grouped_topk_impl",
    ]


def test_every_function_has_its_branch_once(release: bytes) -> None:
    """The tree shows each function of the map, and what it calls, once in full."""
    mapped = mapped_in(release)
    tree = list(walk(call_tree(mapped, everything=True)))
    whole = [branch.item.name for branch in tree if isinstance(branch.item, Function) and not branch.above]
    assert set(whole) == {function.name for function in mapped}
    for function in mapped:
        if function.called:
            assert whole.count(function.name) == 1, function.name


def test_the_tree_of_0_5_9_by_hand() -> None:
    """What a reader of the file would draw."""

    def drawn(branches: Sequence[Branch], depth: int = 0) -> list[str]:
        return [
            line
            for branch in branches
            for line in (f"{'  ' * depth}{branch.item.name}", *drawn(branch.below, depth + 1))
        ]

    tree = {branch.item.name: branch for branch in call_tree(mapped_in(member("0.5.9")))}
    assert tree["TopK.forward_cuda"].to == ("select_experts",)
    assert [branch.item.name for branch in tree["TopK.forward_cuda"].below] == ["routing"]
    assert drawn(tree["select_experts"].below) == [
        *("grouped_topk_cpu", "  grouped_topk_cpu", "grouped_topk_gpu"),
        *("biased_grouped_topk_cpu", "  biased_grouped_topk_cpu", "biased_grouped_topk_gpu"),
        *("  fused_topk_deepseek", "  moe_fused_gate", "  biased_grouped_topk", "  kimi_k2_moe_fused_gate"),
        *("  biased_grouped_topk_impl", "fused_topk_cpu", "  topk_softmax_cpu", "fused_topk_torch_native"),
        *("fused_topk", "  topk_softmax", "  topk_sigmoid", "custom_routing_function", "fused_append_shared_experts"),
    ]


@pytest.mark.parametrize(
    ("version", "leaf", "device", "between"),
    [
        ("0.5.9", "fused_topk_deepseek (flashinfer)", "cuda", {"TopK.forward_cuda", "biased_grouped_topk_gpu"}),
        (
            "0.5.23",
            "fused_topk_deepseek (flashinfer)",
            "cuda",
            {"TopK.forward_cuda", "biased_grouped_topk_gpu", "fused_topk_deepseek", "_post_process_topk_ids"},
        ),
        ("0.5.9", "sgl_kernel.topk_softmax", None, {"fused_topk"}),
        # Three functions call it, so that none of them is certain.
        ("0.5.23", "moe_fused_gate (Triton)", None, {"_post_process_topk_ids"}),
        ("0.4.6", None, "cuda", set()),
        ("0.5.9", None, "cpu", set()),
        (
            "0.5.9",
            "biased_grouped_topk_impl",
            "cpu",
            {"TopK.forward_native", "biased_grouped_topk_gpu", "biased_grouped_topk_impl"},
        ),
        ("0.5.9", "torch.ops.sgl_kernel.topk_softmax_cpu", "cpu", {"TopK.forward_cpu", "fused_topk_cpu"}),
    ],
)
def test_what_surely_runs_is_what_every_way_to_the_leaf_passes(
    version: str, leaf: str | None, device: str | None, between: set[str]
) -> None:
    """Nothing is marked as running that another way could leave out."""
    assert live(mapped_in(member(version)), leaf, device) == between | {"select_experts"}


def test_the_model_chooses_the_branch() -> None:
    """Three functions of 0.5.23 call the same kernel; which of them a model comes to is its own to say."""
    mapped = mapped_in(member("0.5.23"))
    after = {"select_experts", "_post_process_topk_ids", "TopK.forward_cuda"}
    leaf = "moe_fused_gate (Triton)"
    assert live(mapped, leaf, "cuda", "Qwen3MoeForCausalLM") == after | {"fused_topk"}
    assert live(mapped, leaf, "cuda", "Glm4MoeForCausalLM") == after | {"biased_grouped_topk_gpu"}
    assert live(mapped, leaf, "cuda", "DbrxForCausalLM") == after


@pytest.mark.parametrize(
    ("version", "leaf", "modules"),
    [
        ("0.5.23", "moe_fused_gate (Triton)", ("sglang.kernels.ops.moe.moe_fused_gate",)),
        ("0.5.16", "sgl_kernel.moe_fused_gate", ("sgl_kernel",)),
        ("0.5.11", "sgl_kernel.moe_fused_gate", ("sgl_kernel", "mate")),
        ("0.5.11", "grouped_topk (JIT)", ("sglang.jit_kernel.grouped_topk",)),
        ("0.5.9", "fused_topk_deepseek (flashinfer)", ("flashinfer.fused_moe",)),
    ],
)
def test_a_kernel_is_told_from_another_package_s_of_the_same_name(
    version: str, leaf: str, modules: tuple[str, ...]
) -> None:
    """By the word that goes with its name."""
    grouped = {function.name: function for function in mapped_in(member(version))}["biased_grouped_topk_gpu"]
    assert [one.modules for one in grouped.imported if is_leaf(one, leaf_words(leaf))] == [modules]
