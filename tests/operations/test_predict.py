"""``surgeon predict oea``'s story: where the model, the GPU and the costs come from, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from surgeon import patches
from surgeon.bench import active, latency
from surgeon.bench import predict as table
from surgeon.errors import DoesNotFitError, UsageError
from surgeon.operations import predict, subject, survey

if TYPE_CHECKING:
    from pathlib import Path


def run(model: subject.Subject, **asked: Any) -> predict.Outcome:
    """Predict."""
    return predict.run(model, predict.Asked(**asked), patches.load("oea"))


def cell(outcome: predict.Outcome, rows: int, k0: int) -> table.Cell:
    """One cell of the table."""
    return next(one for one in outcome.prediction.cells[k0] if one.rows == rows)


# With free routing: the change of a whole step, in percent, that the numbers of the field give for this node.
@pytest.mark.parametrize(
    ("rows", "k0", "percent"), [(8, 4, -16), (16, 5, -15), (16, 4, -21), (16, 3, -27), (32, 4, -22), (64, 4, -17)]
)
def test_the_ceiling_on_the_glm_5_node_is_the_known_one(rows: int, k0: int, percent: int) -> None:
    """Within a point and a half; those numbers were made with a step fitted in one piece, and the paper's refill."""
    outcome = run(subject.named("GLM-5-NVFP4"), gpu="rtx-pro-6000", tp=8, routing="free", k0s=(k0,), strict=True)
    assert cell(outcome, rows, k0).change * 100 == pytest.approx(percent, abs=1.5)


def test_a_cell_is_made_of_what_it_says() -> None:
    """Layers times c + b*T and the routing step, and what a step takes besides; throughput is its inverse."""
    outcome = run(subject.named("GLM-5-NVFP4"), gpu="rtx-pro-6000", tp=8, routing="unfused")
    found, setup = cell(outcome, 16, 4), outcome.prediction.setup
    assert setup.rest is not None
    native = 75 * (45 + 2.33 * active.uniform(256, 8, 16)) / 1e3 + setup.rest.ms(16)
    patched = 75 * (45 + 2.33 * active.uniform(256, 4, 16) + 28) / 1e3 + setup.rest.ms(16)
    assert found.step_ms == pytest.approx(patched)
    assert found.change == pytest.approx(patched / native - 1)
    assert found.tok_s == pytest.approx(16 / patched * 1e3)
    assert found.gain == pytest.approx(native / patched - 1)
    assert found.best < found.change < found.worst < 0


def test_a_batch_size_pays_from_where_the_saving_is_larger_than_the_routing_step() -> None:
    """Below it experts saved times b is less than the overhead, at it and above more."""
    outcome = run(subject.named("GLM-5-NVFP4"), gpu="rtx-pro-6000", tp=8, k0s=(5,))
    first = outcome.prediction.pays[5].first
    assert first is not None
    assert outcome.prediction.pays[5].last == 64

    def saved(rows: int) -> float:
        kept = active.uniform(256, 5, rows) + active.filled_up(256, 5, 8, rows)
        return 2.33 * (active.uniform(256, 8, rows) - kept)

    assert saved(first) > 28 > saved(first - 1)
    dear = run(subject.named("GLM-5-NVFP4"), gpu="rtx-pro-6000", tp=8, k0s=(5,), overhead_us=500.0)
    assert dear.prediction.pays[5] == table.Span(None, None)


def test_a_batch_too_large_reads_every_expert_anyway() -> None:
    """Where T is saturated with k0 as well, the saving ends; the span says so."""
    small = subject.Subject({**CONFIG, "num_experts": 16}, "small", "here", gpu="h100")
    found = run(small, b_us=2.0, c_us=20.0, overhead_us=5.0, k0s=(4,)).prediction.pays[4]
    assert found.first is not None
    assert found.last is not None
    assert found.last < 64


def test_without_a_published_curve_only_the_layers_are_told_about() -> None:
    """No step is made up; saying what the rest takes gives one."""
    qwen = subject.named("Qwen3-30B-A3B")
    alone = run(qwen, gpu="h100")
    assert cell(alone, 16, 4).step_ms is None
    assert any("upper bound" in caveat for caveat in alone.caveats)
    whole = run(qwen, gpu="h100", rest_ms=5.0)
    assert cell(whole, 16, 4).step_ms == pytest.approx(cell(whole, 16, 4).moe_ms + 5.0)
    assert cell(alone, 16, 4).change < cell(whole, 16, 4).change < 0


def test_expert_parallel_ranks_wait_for_the_slowest() -> None:
    """The rank with most of its experts chosen counts, and experts are whole."""
    outcome = run(subject.named("GLM-5-NVFP4"), gpu="rtx-pro-6000", tp=8, ep=8, k0s=(4,))
    native = next(one for one in outcome.prediction.native if one.rows == 16)
    assert native.busiest == pytest.approx(active.slowest_rank(active.uniform(256, 8, 16), 256, 8))
    assert native.moe_ms == pytest.approx(75 * (68 + 14.35 * native.busiest) / 1e3)
    assert any("slowest rank" in caveat for caveat in outcome.caveats)


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("where", ["config.json", ""])
def test_a_model_is_its_config_json_or_its_folder(tmp_path: Path, where: str) -> None:
    """And is called like the folder."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    model = subject.named(str(tmp_path / where))
    assert (model.name, model.config) == (tmp_path.name, CONFIG)
    assert run(model, gpu="NVIDIA H200").prediction.setup.layer.kind == "measured"


@pytest.mark.parametrize(("text", "reason"), [("{", "cannot be read as JSON"), ("[]", "holds no object")])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """With its name."""
    (tmp_path / "config.json").write_text(text, "utf-8")
    with pytest.raises(UsageError, match=reason):
        subject.named(str(tmp_path))


@pytest.mark.parametrize("name", ["GLM-5.2", "GLM-50", "Qwen3-30B-A3B-Base-Merge", "nothing/here"])
def test_a_model_that_nobody_knows_is_refused(name: str) -> None:
    """A name that only begins like a known one is another model."""
    with pytest.raises(UsageError, match="models that surgeon knows: GLM-5, Qwen3-30B-A3B") as refused:
        subject.named(name)
    assert refused.value.code == "unknown-model"


@pytest.mark.parametrize(("name", "dtype"), [("zai-org/GLM-5-FP8", "fp8"), ("glm-5-nvfp4", "nvfp4")])
def test_a_known_name_may_say_how_it_is_stored(name: str, dtype: str) -> None:
    """Whoever's upload it is."""
    assert run(subject.named(name), gpu="rtx-pro-6000", tp=8).prediction.setup.dtype == dtype


def test_the_shipped_recipe_says_all_but_the_gpu() -> None:
    """Model, split, dtype and kernel come from it; the GPU must be said."""
    model = subject.from_recipe("glm5-nvfp4-rtx-pro-6000")
    found = run(model, gpu="rtx-pro-6000").prediction.setup
    assert (found.tp, found.dtype, found.layer.kernel, found.shape.layers) == (8, "nvfp4", "flashinfer_cutlass", 75)
    assert found.rest is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [("model = ", "cannot be read as TOML"), ('name = "x"', "names no model")],
    ids=["toml", "model"],
)
def test_a_recipe_that_cannot_be_used_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """With the file's name."""
    (tmp_path / "r.toml").write_text(text, "utf-8")
    with pytest.raises(UsageError, match=reason):
        subject.from_recipe(str(tmp_path / "r.toml"))
    with pytest.raises(UsageError, match="there is no recipe 'nowhere'"):
        subject.from_recipe("nowhere")


def seen(*words: str, gpus: tuple[str, ...] = (), config: dict[str, Any] | None = None, **info: Any) -> survey.Survey:
    """What a survey tells of a node."""
    server = {
        "pid": 7,
        "start_ticks": 1,
        "started": 1.0,
        "uid": 0,
        "user": "root",
        "argv": ["python", "-m", "sglang.launch_server", *words],
        "cwd": "/",
        "interpreter": "/python",
        "port": 30000,
        "host": "127.0.0.1",
        "listening": True,
        "model_path": "/models/GLM-5-NVFP4",
        "log": None,
        "workers": [],
        "tree": [7],
        "env": {},
    }
    raw = {"servers": [server], "chosen": 7, "model": {"path": "/models", "config": config}, "server_info": info}
    return survey.parse({**raw, "gpus": [{"name": name} for name in gpus]})


def test_a_running_server_tells_all() -> None:
    """Its model, GPUs, split, quantization and kernel, as it resolved them."""
    node = seen(
        gpus=("NVIDIA RTX PRO 6000 Blackwell Server Edition",) * 8,
        config=latency.data("models")["GLM-5"],
        tp_size=8,
        ep_size=1,
        quantization="modelopt_fp4",
        moe_runner_backend="flashinfer_cutlass",
    )
    found = run(subject.served(node)).prediction.setup
    assert (found.shape.name, found.gpu, found.tp, found.dtype) == ("GLM-5-NVFP4", "rtx-pro-6000", 8, "nvfp4")
    assert found.rest is not None


def test_a_server_that_does_not_answer_is_read_from_its_command_line() -> None:
    """Options in both spellings; DP attention and speculation are told of."""
    words = ("--tp-size=4", "--ep", "2", "--enable-dp-attention", "--speculative-algorithm", "NEXTN")
    found = subject.served(seen(*words, config=CONFIG))
    assert (found.tp, found.ep, found.gpu) == (4, 2, None)
    assert [("DP attention" in note, "speculative" in note) for note in found.notes] == [(True, False), (False, True)]


def test_a_kernel_that_nobody_measured_is_refused_unless_another_is_named() -> None:
    """The server's own word decides; a person may go by another."""
    node = seen(gpus=("NVIDIA H100 80GB HBM3",), config=CONFIG, tp_size=1, moe_runner_backend="deep_gemm")
    with pytest.raises(DoesNotFitError, match="under deep_gemm; measured there: bf16 triton"):
        run(subject.served(node))
    assert run(subject.served(node), kernel="triton").prediction.setup.layer.kernel == "triton"


def test_a_node_without_a_server_or_a_config_is_refused() -> None:
    """What to say instead is said."""
    with pytest.raises(DoesNotFitError, match="no server is running") as refused:
        subject.served(survey.parse({}))
    assert "--model" in refused.value.advice
    with pytest.raises(DoesNotFitError, match=r"config\.json of /models/GLM-5-NVFP4 could not be read"):
        subject.served(seen())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "no GPU is named"),
        ({"gpu": "rtx-4090"}, "no measured layer times for the GPU 'rtx-4090'"),
        ({"gpu": "h100", "k0s": (8,)}, r"k0 is 8; expected 1\.\.7"),
        ({"gpu": "h100", "tp": 8, "ep": 3}, "expected ep to divide tp"),
        ({"gpu": "h100", "dtype": "fp12"}, "dtype 'fp12' is unknown"),
        ({"gpu": "h100", "overhead_us": -1.0}, "expected 0 or more"),
        ({"b_us": 1.0}, "go together"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], reason: str) -> None:
    """Each with what was expected."""
    with pytest.raises((UsageError, DoesNotFitError), match=reason):
        run(subject.Subject(CONFIG, "qwen", "here"), **asked)


def test_own_measurements_need_no_gpu() -> None:
    """Whoever measured b and c says them."""
    found = run(subject.Subject(CONFIG, "qwen", "here"), b_us=1.5, c_us=30.0).prediction.setup
    assert (found.layer.b, found.layer.c, found.layer.kind) == (1.5, 30.0, "given")


def test_a_recording_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """With how to make one."""
    with pytest.raises(UsageError, match="No such file") as refused:
        run(subject.Subject(CONFIG, "qwen", "here"), gpu="h100", recordings=(tmp_path / "none.pt",))
    assert refused.value.code == "no-recording"
    assert "surgeon record routing" in refused.value.advice


def test_shares_of_each_expert_may_be_given(tmp_path: Path) -> None:
    """As shares or counts, of one layer or of several; uniform ones give the uniform formula."""
    model = subject.Subject({**CONFIG, "num_experts": 16, "num_experts_per_tok": 4}, "small", "here")
    file = tmp_path / "shares.json"

    def told(value: object) -> list[float]:
        file.write_text(json.dumps(value), "utf-8")
        found = run(model, b_us=1.0, c_us=1.0, shares=file, k0s=(2,), batches=(8,)).prediction
        return [found.native[0].active, found.cells[2][0].active]

    uniform = [active.uniform(16, 4, 8), active.uniform(16, 2, 8) + active.filled_up(16, 2, 4, 8)]
    assert told([0.25] * 16) == pytest.approx(uniform)
    assert told([[7] * 16, [100] * 16]) == pytest.approx(uniform)
    assert told([1.0] * 4 + [0.0] * 12) == pytest.approx([4, 4])
    skewed = told([4, 3, 3, 2] + [1] * 12)
    assert skewed[0] < uniform[0]
    assert skewed[1] < uniform[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[0.5, 0.5]", "expected 128 numbers for each layer"),
        (json.dumps([-1.0] * 128), "expected 128 numbers for each layer"),
        (json.dumps([0.0] * 128), "expected 128 numbers for each layer"),
        (json.dumps([100] + [1] * 127), "more often than once per token"),
    ],
)
def test_shares_that_make_no_sense_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    """Of another model, below zero, none at all, or an expert chosen twice by a token."""
    (tmp_path / "shares.json").write_text(text, "utf-8")
    with pytest.raises(UsageError, match=reason):
        run(subject.Subject(CONFIG, "qwen", "here"), gpu="h100", shares=tmp_path / "shares.json")


def test_the_columns_are_those_worth_a_look() -> None:
    """Around half of k and up."""
    assert [table.columns(k) for k in (8, 4, 2, 16)] == [(3, 4, 5, 6), (2, 3), (1,), (7, 8, 9, 10)]
