"""What is served, as a person says it."""

from __future__ import annotations

import json
import re
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from surgeon import surgery
from surgeon.errors import UsageError
from surgeon.operations import served
from surgeon.operations.served import BACKENDS, ByHand, Served, read_gpu, read_server_args, words_to_args
from surgeon.registry.wheels import fetch
from tests.support.local_node import local_node

if TYPE_CHECKING:
    from pathlib import Path

GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("said", "capability"),
    [
        ("12.0", (12, 0)),
        ("sm120", (12, 0)),
        ("SM_100a", (10, 0)),
        ("sm90", (9, 0)),
        ("H200", (9, 0)),
        ("NVIDIA H20", (9, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("GB300", (10, 3)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0)),
        ("rtx-pro-6000", (12, 0)),
        ("RTX5090", (12, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA L4", (8, 9)),
        ("cpu", None),
    ],
)
def test_a_gpu_is_known_by_capability_or_name(said: str, capability: tuple[int, int] | None) -> None:
    """As nvidia-smi prints it, as a compiler flag spells it, or as people call it."""
    assert read_gpu(said) == capability


@pytest.mark.parametrize("said", ["", "b2000", "12", "rtx", "sm", "geforce"])
def test_a_gpu_that_nobody_knows_is_refused(said: str) -> None:
    """Rather than judged as one that it is not."""
    with pytest.raises(UsageError, match="no GPU that surgeon knows") as refused:
        read_gpu(said)
    assert refused.value.where == "--gpu"


def test_server_args_are_read_as_sglang_reads_them() -> None:
    """Values behind a space or an equals sign, flags, numbers, lists, and the short names of sizes."""
    args, odd = read_server_args(
        "python -m sglang.launch_server --moe-runner-backend=triton --tp 8 --ep-size 1 --enable-lora "
        "--cuda-graph-bs 1 2 4 --model '/m/a model'"
    )
    assert args == {
        "moe_runner_backend": "triton",
        "tp_size": 8,
        "ep_size": 1,
        "enable_lora": True,
        "cuda_graph_bs": [1, 2, 4],
        "model_path": "/m/a model",
    }
    assert odd == ()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("--moe-runner-backend trtllm", "no release of sglang has"),
        ("--moe-runner-backend", "takes one value; found none"),
        ("--quantization fp8 int8", "takes one value; found fp8 int8"),
        ("--device gpu", "no release of sglang has"),
        ("--model-path 'a", "No closing quotation"),
        ("triton", "no server argument begins with dashes"),
    ],
)
def test_server_args_that_make_no_sense_are_refused(said: str, message: str) -> None:
    """They would otherwise be taken for the default."""
    with pytest.raises(UsageError, match=message):
        read_server_args(said)


def test_a_misspelt_name_is_told() -> None:
    """It is no error: sglang has hundreds of arguments that decide nothing here."""
    _, odd = read_server_args("--moe-runer-backend triton --disable-radix-cache")
    assert odd == ("--moe-runer-backend decides nothing here; did you mean --moe-runner-backend?",)


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "file"), [("0.5.1", "server_args"), ("0.5.9", "server_args"), ("0.5.23", "choices")]
)
def test_every_backend_of_a_release_is_known(version: str, file: str) -> None:
    """None is refused that sglang takes."""
    with zipfile.ZipFile(fetch(version)) as wheel:
        (path,) = [name for name in wheel.namelist() if re.search(rf"srt/(arg_groups/)?{file}\.py$", name)]
        source = wheel.read(path).decode()
    listed = re.search(
        r"(?:MOE_RUNNER_BACKEND_CHOICES = \[|moe-runner-backend\",.*?choices=\[)(.*?)\]", source, re.DOTALL
    )
    assert listed is not None
    names = set(re.findall(r'"(\w+)"', listed[1]))
    assert len(names) >= 6
    assert names - BACKENDS == set()


def test_what_is_said_goes_before_what_was_found(tmp_path: Path) -> None:
    """The model, the GPU and single arguments are each replaced alone; a typed launch is no longer a resolved one."""
    (tmp_path / "config.json").write_text(json.dumps(GLM5))
    found = Served(
        config={"architectures": ["Qwen3MoeForCausalLM"]},
        model="/m",
        args={"moe_runner_backend": "auto", "quantization": "fp8", "internal_states": []},
        capability=(9, 0),
    )
    assert ByHand().over(found) == found
    only_model = ByHand(model=str(tmp_path)).over(found)
    assert (only_model.architecture, only_model.capability) == ("GlmMoeDsaForCausalLM", (9, 0))
    assert only_model.args == found.args
    typed = ByHand(server_args="--moe-runner-backend triton").over(found)
    assert typed.args == {"moe_runner_backend": "triton", "quantization": "fp8"}
    assert ByHand(gpu="cpu").over(found).args["device"] == "cpu"


def test_the_same_model_is_judged_by_the_gpu_that_is_said(tmp_path: Path) -> None:
    """GLM-5 in fp8 passes the site on Hopper, and bypasses it on a B200."""
    path = tmp_path / "any.json"
    path.write_text(json.dumps(GLM5))
    hopper = ByHand(model=str(path), gpu="H200").over(None).live("0.5.9")
    assert isinstance(hopper, surgery.Reached)
    blackwell = ByHand(model=str(path), gpu="B200").over(None)
    assert isinstance(blackwell.live("0.5.9"), surgery.NotReached)
    routed = ByHand(model=str(path), gpu="B200", server_args="--moe-runner-backend flashinfer_trtllm_routed").over(None)
    assert isinstance(routed.live("0.5.10"), surgery.Reached)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("[]", "names no architectures"), ("{}", "names no architectures")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """And so is a path where nothing is."""
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        ByHand(model=str(path)).over(None)
    with pytest.raises(UsageError, match=r"no config.json at"):
        ByHand(model=str(tmp_path / "nothing")).over(None)


def test_the_text_part_of_a_model_that_sees_counts(tmp_path: Path) -> None:
    """Multimodal models keep their experts' numbers in it."""
    inner = {**GLM5, "architectures": None}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Kimi"], "text_config": {"n_group": 3, **inner}})
    )
    served = ByHand(model=str(tmp_path)).over(None)
    assert served.config["n_routed_experts"] == 256


def test_a_model_that_only_the_node_has_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its folder or its file, in one more round trip; what is nowhere is told with both places."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GLM5))
    monkeypatch.setattr(served, "_here", lambda _: None)
    with local_node(tmp_path / "state") as node:
        for said in (model, model / "config.json"):
            found = ByHand(model=str(said)).over(None, node)
            assert (found.model, found.architecture) == (str(model), "GlmMoeDsaForCausalLM")
        with pytest.raises(UsageError, match="on this machine or on"):
            ByHand(model=str(tmp_path / "nothing")).over(None, node)


@pytest.mark.parametrize(
    ("architecture", "kernels", "leaf"),
    [
        ("Glm4MoeForCausalLM", False, "biased_grouped_topk_impl"),
        ("Qwen3MoeForCausalLM", False, "fused_topk_torch_native"),
        # Whether they have AMX is not known here.
        ("Glm4MoeForCausalLM", True, None),
        ("Glm4MoeForCausalLM", None, None),
        ("DbrxForCausalLM", False, None),
    ],
)
def test_the_leaf_on_a_cpu_is_torch_s_where_no_kernels_are(
    architecture: str,
    kernels: bool | None,  # noqa: FBT001 - a case
    leaf: str | None,
) -> None:
    """What the lab's server was seen to run; tests/e2e/test_leaf_trace.py watches it."""
    found = Served(config={**GLM5, "architectures": [architecture]}, args={"device": "cpu"}, kernels=kernels)
    verdict = found.live("0.5.9")
    assert isinstance(verdict, surgery.Reached)
    assert verdict.leaf == leaf


def test_words_without_a_launcher_keep_their_order() -> None:
    """The last one of two counts, as with argparse."""
    assert words_to_args(["--tp", "2", "--tp-size=4"]) == {"tp_size": 4}
