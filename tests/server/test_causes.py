"""Causes are read from logs as Python, torch and sglang write them."""

from __future__ import annotations

import pytest

from surgeon.server.causes import CAUSES, diagnose

TRACE = "[2026-01-02 03:04:05 TP3] Scheduler hit an exception: Traceback (most recent call last):\n"

LOGS: dict[str, str] = {
    "patched-file-syntax": TRACE
    + '  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/layers/moe/topk.py", line 812\n'
    + "    if _surgeon_oea.active\n"
    + "                          ^\n"
    + "SyntaxError: expected ':'\n",
    "patch-import": TRACE
    + '  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/layers/moe/topk.py", line 700, in <module>\n'
    + "    from sglang.srt.layers.moe import _surgeon_oea\n"
    + "ImportError: cannot import name '_surgeon_oea' from 'sglang.srt.layers.moe'\n",
    "patch-raised": TRACE
    + '  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/layers/moe/_surgeon_oea.py", line 320, in route\n'
    + "    union = torch.zeros(experts)\n"
    + "RuntimeError: CUDA error: operation not permitted when stream is capturing\n",
    "model-type": "ValueError: The checkpoint you are trying to load has model type `glm_moe_dsa` but Transformers "
    "does not recognize this architecture. This could be because of an issue with the checkpoint.\n",
    "undefined-symbol": "ImportError: /opt/venv/lib/python3.12/site-packages/sgl_kernel/sm100/common_ops.abi3.so: "
    "undefined symbol: _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib\n",
    "shared-memory": TRACE
    + "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, "
    + "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.\n",
    "deep-gemm": "AttributeError: module 'deep_gemm' has no attribute 'get_num_sms'\n",
    "attention-architecture": "RuntimeError: Assertion error (csrc/apis/attention.hpp:122): Unsupported architecture\n",
    "kernel-architecture": "RuntimeError: CUDA error: no kernel image is available for execution on the device\n",
    "moe-backend": "NotImplementedError: Unsupported runner for this scheme. "
    "Use --moe-runner-backend flashinfer_cutlass instead.\n",
    "nan": "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0\n",
    "out-of-memory": TRACE
    + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 94.97 GiB "
    + "of which 1.2 GiB is free.\n",
    "port-in-use": "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): "
    "address already in use\n",
    "missing-weights": "KeyError: 'model.layers.78.eh_proj.weight'\n",
    "weight-shape": "    assert param_data.shape == loaded_weight.shape\nAssertionError\n",
    "no-gpu": "RuntimeError: No CUDA GPUs are available\n",
    "shared-library": "ImportError: libnvrtc.so.13: cannot open shared object file: No such file or directory\n",
    "arguments": "launch_server.py: error: unrecognized arguments: --disable-piecewise-cuda-graph\n",
    "model-not-found": "OSError: org/glm is not a local folder and is not a valid model identifier listed on the hub\n",
    "disk-full": "OSError: [Errno 28] No space left on device: '/home/me/.cache/flashinfer/x.o'\n",
    "import": "Traceback (most recent call last):\nModuleNotFoundError: No module named 'partial_json_parser'\n",
    "not-implemented": TRACE + "NotImplementedError: nope for this quantization\n",
    "device-assert": "RuntimeError: CUDA error: device-side assert triggered\n",
    "warm-up": "[2026-01-02 03:04:05] Initialization failed. warmup error: Traceback (most recent call last):\n"
    "AssertionError: res=<Response [502]>\n",
    "watchdog": "[2026-01-02 03:09:05 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n",
    "nccl": "[rank3]:[E102 03:04:05] [PG ID 2 Rank 3] ProcessGroupNCCL's watchdog got stuck; "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n",
    "killed": "Rank 0 scheduler is dead. Please check if there are relevant logs.\n",
    "moe-config": "Using default MoE kernel config. Performance might be sub-optimal! Config file not found at "
    "/opt/x/configs/triton_3_4_0/E=257,N=256,device_name=NVIDIA_RTX_PRO_6000.json\n",
}


def test_every_cause_of_the_table_has_a_log_here() -> None:
    """A pattern without an example is a guess."""
    assert [cause.name for cause in CAUSES] == list(LOGS)
    assert all(cause.meaning and cause.advice for cause in CAUSES)


@pytest.mark.parametrize("name", LOGS)
def test_a_cause_is_read_from_the_log_of_such_a_failure(name: str) -> None:
    """Between the lines of a normal start, and with what follows from it."""
    before = "[2026-01-02 03:04:00] server_args=ServerArgs(model_path='M', watchdog_timeout=300, nccl_port=None)\n"
    after = "[2026-01-02 03:04:06] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
    found = diagnose(before + LOGS[name] + after)
    assert found is not None
    assert found.cause.name == name
    assert found.line in LOGS[name]
    assert found.cause.advice


@pytest.mark.parametrize(
    ("log", "name"),
    [
        ("KeyError: 'glm_moe_dsa'", "model-type"),
        ("KeyError: 'deepseek_v32'", "model-type"),
        ("KeyError: 'input_ids'", "exception"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. x", "out-of-memory"),
        ("OSError: [Errno 98] Address already in use", "port-in-use"),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "no-gpu"),
        ("NCCL error in: x.cpp:1, unhandled system error, ncclSystemError", "nccl"),
    ],
)
def test_other_words_for_the_same_are_known(log: str, name: str) -> None:
    """Each library says it in its own way; an ordinary KeyError is no model type."""
    found = diagnose(log + "\n")
    assert found is not None
    assert found.cause.name == name


def test_the_first_cause_is_told_and_not_what_follows_from_it() -> None:
    """A rank out of memory takes NCCL, the watchdog and the launcher down with it."""
    log = LOGS["out-of-memory"] + LOGS["nccl"] + LOGS["watchdog"] + LOGS["killed"]
    found = diagnose(log)
    assert found is not None
    assert found.cause.name == "out-of-memory"


def test_an_unknown_exception_is_told_by_its_last_line() -> None:
    """Better than nothing, and marked as unknown."""
    found = diagnose(TRACE + "a.b.CustomError: first\nx\nsglang.errors.OtherError: second thing\n")
    assert found is not None
    assert found.cause.name == "exception"
    assert found.line == "sglang.errors.OtherError: second thing"
    assert "second thing" in found.text


def test_a_healthy_log_has_no_cause() -> None:
    """Words like watchdog_timeout and nccl_port among the arguments are no failure."""
    log = (
        "[2026-01-02 03:04:00] server_args=ServerArgs(watchdog_timeout=300, nccl_port=None, error=None)\n"
        "[2026-01-02 03:04:09 TP0] Init torch distributed begin.\n"
        "[2026-01-02 03:04:10 TP0] Load weight end. type=GlmMoeDsaForCausalLM, dtype=torch.bfloat16, avail mem=12 GB\n"
        "[2026-01-02 03:05:10] The server is fired up and ready to roll!\n"
    )
    assert diagnose(log) is None
    assert diagnose("") is None


def test_a_very_long_line_is_cut() -> None:
    """A traceback may hold a whole tensor."""
    found = diagnose("RuntimeError: CUDA out of memory " + "x" * 5000 + "\n")
    assert found is not None
    assert len(found.line) == 300
