"""Compiles the fused operator for a GPU that need not be there: prints one line of JSON, a list of what came out.

Started by tests/patches/oea/test_kernel.py as ``oea_kernel_build.py CAPABILITY`` with SURGEON_LAYERS, folders with
torch and Triton: both launches, as a plain softmax model of 128 experts needs them and as any policy of a group-limited
sigmoid model of 256 experts with a shared one does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.extend(os.environ["SURGEON_LAYERS"].split(os.pathsep))
sys.path.insert(0, os.fspath(__file__).rpartition("/tests/")[0])

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpu import cases

TYPES = {
    "router_logits": "*bf16", "logits_stride": "i32", "bias": "*fp32", "topk_ids": "*i32", "ids_stride": "i32",
    "policy": "*i64", "real_rows": "*i64", "rows": "i32", "scores_out": "*fp32", "order_out": "*i32",
    "votes_out": "*i32", "protected_out": "*i32", "utility_out": "*i32", "topk_weights": "*fp32",
    "weights_stride": "i32", "scores_in": "*fp32", "order_in": "*i32", "votes_in": "*i32", "protected_in": "*i32",
    "utility_in": "*i32", "new_weights": "*fp32", "new_ids": "*i32", "changed_out": "*i8",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {
        "K": 8, "COLUMNS": 8, "EXPERTS": 128, "SCORING": 0, "RENORMALIZE": True, "GROUPS": 1, "GROUPS_KEPT": 1,
        "PLAIN": True, "BIASED": False, "COUNTED": True, "WIDTH": 128, "GROUPS_WIDTH": 1, "SCALE": 1.0,
        "UTILITY_BITS": 46, "SLOTS": 8,
    },
    "any policy": {
        "K": 8, "COLUMNS": 9, "EXPERTS": 256, "SCORING": 1, "RENORMALIZE": True, "GROUPS": 8, "GROUPS_KEPT": 4,
        "PLAIN": False, "BIASED": True, "COUNTED": True, "WIDTH": 256, "GROUPS_WIDTH": 8, "SCALE": 2.5,
        "UTILITY_BITS": 46, "SLOTS": 16,
    },
}  # fmt: skip


def build(function: Any, constants: dict[str, Any], capability: int) -> dict[str, Any]:
    """Machine code of one launch, and what it takes."""
    names = function.arg_names
    source = ASTSource(
        function,
        signature={name: TYPES.get(name, "constexpr") for name in names},
        constexprs={name: constants[name] for name in names if name not in TYPES},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if TYPES.get(name, "")[:1] == "*"},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
    tool = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", said.stdout + said.stderr)
    assert used is not None, said
    registers, stack, shared, local = map(int, used.groups())
    return {
        "registers": registers,
        "stack": stack,
        "shared": shared,
        "local": local,
        "redux": made.asm["ptx"].count("redux.sync"),
    }


def main(capability: int) -> list[dict[str, Any]]:
    """Every launch of every model."""
    kernel: Any = cases.load("kernel")
    return [
        {"model": model, "launch": function.fn.__name__, **build(function, constants, capability)}
        for model, constants in MODELS.items()
        for function in (kernel._vote, kernel._route)
    ]


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))  # noqa: T201 - its answer
