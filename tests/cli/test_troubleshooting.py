"""docs/troubleshooting.md quotes what surgeon really says: each refusal is produced by the code and looked up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.surgery import CannotTell, NotReached, Reached, live_path, locate
from surgeon.surgery.live_path import BEFORE
from surgeon.surgery.outcomes import Ambiguous, NotFound
from tests.support.bed import make_bed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.bed import Bed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SM90, SM100, SM120 = (9, 0), (10, 0), (12, 0)
MOE = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
FP8 = {**MOE, "quantization_config": {"quant_method": "fp8"}}
NVFP4 = {
    **MOE,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*shared_experts*"]},
}
DSV3, DSV4, GLM5, QWEN3 = (
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Qwen3MoeForCausalLM",
)
TRTLLM, MXFP4 = {"moe_runner_backend": "flashinfer_trtllm"}, {"moe_runner_backend": "flashinfer_mxfp4"}
HASHED = {**FP8, "num_hash_layers": 3, "num_hidden_layers": 3}


def quotes(section: str) -> set[str]:
    """What one section of the page quotes, each quote in one line.

    Args:
        section: its heading.
    """
    (text,) = re.findall(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"(?:^> .*\n)+", text, re.MULTILINE)
    return {" ".join(line.removeprefix("> ") for line in block.splitlines()) for block in blocks}


REFUSED: list[tuple[str, str, str, dict[str, Any], dict[str, Any], tuple[int, int] | None]] = [
    ("BYPASSED: the flashinfer kernel selects", "0.5.23", QWEN3, FP8, TRTLLM, SM90),
    ("BYPASSED: the flashinfer kernel selects", "0.5.9", DSV3, FP8, {}, SM100),
    ("BYPASSED: the flashinfer kernel selects", "0.5.10", DSV3, NVFP4, TRTLLM, SM100),
    ("BYPASSED by the quantization method", "0.5.23", GLM5, NVFP4, {}, SM120),
    (
        "TRITON_KERNEL: the triton_kernels package selects",
        "0.5.9",
        QWEN3,
        MOE,
        {"moe_runner_backend": "triton_kernel"},
        SM90,
    ),
    ("Flags of sglang 0.4", "0.4.10", DSV3, MOE, {"enable_flashinfer_trtllm_moe": True}, SM100),
    ("Flags of sglang 0.4", "0.4.10", DSV3, MOE, {"enable_triton_kernel_moe": True}, SM90),
    (
        "PACKED: the runner reads ids that were packed before the site",
        *("0.5.23", DSV4, {**FP8, "model_type": "deepseek_v41"}, MXFP4, SM100),
    ),
    ("The model brings a routing function", "0.5.23", "Llama4ForCausalLM", MOE, {}, SM90),
    ("The model has a router of its own", "0.5.23", "ZayaForCausalLM", MOE, {}, SM90),
    ("Hash routing", "0.5.23", DSV4, HASHED, {}, SM90),
    ("Ascend NPU", "0.5.23", QWEN3, MOE, {"device": "npu"}, None),
    ("No experts", "0.5.23", "LlamaForCausalLM", {"hidden_size": 8}, {}, SM90),
]


@pytest.mark.parametrize(("section", "version", "architecture", "config", "args", "gpu"), REFUSED)
def test_each_refusal_is_quoted_with_its_remedy(
    section: str,
    version: str,
    architecture: str,
    config: dict[str, Any],
    args: dict[str, Any],
    gpu: tuple[int, int] | None,
) -> None:
    """What live_path says, word by word, in the section that explains it."""
    verdict = live_path(version, architecture, config, args, gpu)
    assert isinstance(verdict, NotReached)
    said = quotes(section)
    # The third case differs from the first by its remedy only; the page has its sentence once.
    assert verdict.why in said
    assert verdict.remedy in said


def test_no_rule_before_the_tables_is_without_a_section() -> None:
    """Every rule that can refuse was asked by one of the cases above."""
    refusing = {rule.__name__ for rule in BEFORE} - {"_on_cpu"}
    assert refusing == {"_dense", "_own_router", "_own_routing_function", "_hashed", "_elsewhere"}


def test_what_surgeon_cannot_tell_is_quoted() -> None:
    """Both kinds: before the backend is known, and after."""
    said = quotes("Cannot tell")
    for args in ({}, MXFP4):
        verdict = live_path("0.5.23", DSV4, FP8, args, SM100)
        assert isinstance(verdict, CannotTell)
        assert verdict.why in said


def test_the_notes_are_quoted() -> None:
    """What limits a verdict that stays 'reached'."""
    hashed = live_path("0.5.23", DSV4, {**HASHED, "num_hidden_layers": 61}, {"moe_runner_backend": "triton"}, SM90)
    assert isinstance(hashed, Reached)
    assert hashed.notes[0] in quotes("Hash routing")
    adapters = live_path("0.5.23", QWEN3, MOE, {"enable_lora": True}, SM90)
    assert isinstance(adapters, Reached)
    assert adapters.notes[0] in quotes("PACKED: the runner reads ids that were packed before the site")


FUNCTION = """\
def select_experts(hidden_states, router_logits, topk_config):
    topk_weights, topk_ids = fused_topk(router_logits)
    topk_ids, topk_weights = _post_process_topk_ids(topk_ids, topk_weights)
    return topk_weights, topk_ids
"""
TWICE = FUNCTION.replace(
    "    return", "    topk_ids, topk_weights = _post_process_topk_ids(topk_ids, topk_weights)\n    return"
)


@pytest.mark.parametrize(
    ("section", "source", "kind"),
    [
        ("More than one match", f"{FUNCTION}\n\n{FUNCTION}", Ambiguous),
        ("More than one match", TWICE, Ambiguous),
        ("A compiled region", f"@torch.compile(dynamic=True)\n{FUNCTION}", NotFound),
    ],
)
def test_each_refusal_of_the_search_is_quoted(section: str, source: str, kind: type) -> None:
    """What locate says of a file that it does not cut."""
    outcome = locate(source.encode())
    assert type(outcome) is kind
    assert isinstance(outcome, Ambiguous | NotFound)
    assert outcome.reason in quotes(section)


@pytest.fixture
def bypassed(tmp_path: Path) -> Iterator[Bed]:
    """A server whose model routes by a function of its own."""
    with make_bed(tmp_path / "bed") as bed:
        path = bed.fake.model / "config.json"
        config = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps({**config, "architectures": ["Llama4ForCausalLM"]}), "utf-8")
        bed.fake.start()
        yield bed


def test_apply_refuses_with_exit_code_4_and_nothing_forces_it(bypassed: Bed) -> None:
    """The refusal is the page's; the file stays as it is, and --force is no option of apply."""
    before = bypassed.facts()
    answer = bypassed.apply()
    assert answer.code == 4
    told = " ".join(answer.stderr.split())
    assert "the served model never takes this code:" in told
    assert "the served model never takes this code:" in " ".join(PAGE.split())
    why = next(quote for quote in quotes("The model brings a routing function") if quote.startswith("Llama4"))
    assert why in told
    assert bypassed.apply("--force").code == 2
    assert bypassed.facts() == before
