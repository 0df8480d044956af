"""The fused form of the operator: in Triton's interpreter against the torch form and plain loops; compiled for GPUs.

Nothing here has a GPU; tests/gpu/oea.py is for a machine that has one. SURGEON_OEA_KERNEL_CASES says how many random
batches (350 if it is not set: half a minute of one core), SURGEON_OEA_SEED which.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surgeon import lab

TOP = Path(__file__).parents[3]
KERNEL = TOP / "patches" / "oea" / "kernel.py"
OPERATOR = TOP / "patches" / "oea" / "operator.py"
CASES = int(os.environ.get("SURGEON_OEA_KERNEL_CASES", "350"))
SEED = int(os.environ.get("SURGEON_OEA_SEED", "20251102"))


def run(script: str, *arguments: str, **environ: str) -> Any:
    """Run a script of the tests in a process of its own, with torch and Triton; what it printed last, as JSON."""
    layers = os.pathsep.join((str(lab.torch_layer()), str(lab.triton_layer())))
    # Triton 3.9 warns unless it is told whether to contract a * b + c; this is what it does anyway.
    told = {"SURGEON_LAYERS": layers, "TRITON_DEFAULT_FP_FUSION": "1", **environ}
    done = subprocess.run(
        [sys.executable, str(TOP / "tests" / script), *arguments],
        env={**os.environ, **told},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300 + CASES)
def test_chooses_as_the_torch_form_and_the_plain_loops_do() -> None:
    """On random batches of any model and policy: ids exactly, weights to 1e-6, untouched rows to the bit."""
    told = run("support/oea_kernel_run.py", str(SEED), str(CASES), TRITON_INTERPRET="1")
    assert told["cases"] == CASES
    # That the cases are about something: most rows are changed, and the loops had a say in most.
    assert told["changed"] > told["rows"] * 0.3
    assert told["by_loops"] > CASES * 0.6


def test_does_so_in_the_interpreter_as_it_is() -> None:
    """A few of the same batches without what makes the interpreter quick."""
    assert run("support/oea_kernel_run.py", str(SEED), "3", "--unchanged", TRITON_INTERPRET="1")["cases"] == 3


@pytest.mark.parametrize("capability", [80, 120])
def test_compiles_for_gpus_without_spilling(capability: int, tmp_path: Path) -> None:
    """Triton and ptxas make machine code of both launches; it reduces in one instruction and spills no register."""
    built = run("support/oea_kernel_build.py", str(capability), TRITON_CACHE_DIR=str(tmp_path))
    assert len(built) == 4
    for kernel in built:
        assert kernel["stack"] == kernel["local"] == 0, kernel
        assert kernel["redux"] > 0, kernel


def constants(path: Path) -> dict[str, Any]:
    """The numbers that a file gives names to at its top, ``tl.constexpr(n)`` and tuples of names included."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_bytes()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            value = node.value  # type: ignore[attr-defined]  # both kinds of assignment have it
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.constexpr":
                (value,) = value.args
            try:
                number = eval(ast.unparse(value), {"float": float, **found})  # noqa: S307 - our own source
            except Exception:  # noqa: BLE001, S112 - not a number
                continue
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = number if isinstance(target, ast.Tuple) else [number]
            found.update((ast.unparse(name), one) for name, one in zip(names, values, strict=True))
    return found


def test_means_by_each_number_what_the_operator_means() -> None:
    """Indices and values of the policy tensor and the fixed points are written down twice, and are the same."""
    ours, theirs = constants(KERNEL), constants(OPERATOR)
    numbers = {name for name, value in theirs.items() if not isinstance(value, str)} - {"MOST_EXPERTS"}
    shared = [name for name in ours if name.lstrip("_") in numbers]
    assert len(shared) >= 16
    assert {name: ours[name] for name in shared} == {name: theirs[name.lstrip("_")] for name in shared}
    assert ours["_EPSILON"] == theirs["_EPSILON"]
    assert ours["_IDS"] == theirs["MOST_EXPERTS"] >= ours["MOST_EXPERTS"]
    assert ours["_SCORINGS"] == (theirs["SOFTMAX"], theirs["SIGMOID"], theirs["SQRTSOFTPLUS"])


def test_is_written_for_python_3_8_and_needs_torch_and_triton_alone() -> None:
    """It parses as Python 3.8 and imports nothing else at its top."""
    tree = ast.parse(KERNEL.read_bytes(), feature_version=(3, 8))
    named = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    taken = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert named | taken == {"torch", "triton", "triton.language", "typing", "__future__"}
