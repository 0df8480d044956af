"""The table of live paths: every cell that the wheels' own code gives, beside what surgeon's rules say.

`python -m tests.support.live_table` compares all releases from 0.4.6 on (half an hour on two cores), or those named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.registry.wheels import fetch
from surgeon.surgery.live_path import CannotTell, Reached, live_path
from tests.support.oracle.served import MODELS, QUANTIZATIONS

TOP = Path(__file__).resolve().parents[2]
# All releases from 0.4.6 on that have a wheel (`pip index versions sglang`).
RELEASES = (
    "0.4.6",
    "0.4.6.post1",
    "0.4.6.post2",
    "0.4.6.post3",
    "0.4.6.post4",
    "0.4.6.post5",
    "0.4.7",
    "0.4.7.post1",
    "0.4.8",
    "0.4.8.post1",
    "0.4.9",
    "0.4.9.post1",
    "0.4.9.post2",
    "0.4.9.post3",
    "0.4.9.post4",
    "0.4.9.post5",
    "0.4.9.post6",
    "0.4.10",
    "0.4.10.post1",
    "0.4.10.post2",
    "0.5.1",
    "0.5.1.post1",
    "0.5.1.post2",
    "0.5.1.post3",
    "0.5.2",
    "0.5.3",
    "0.5.3.post1",
    "0.5.3.post2",
    "0.5.3.post3",
    "0.5.4",
    "0.5.4.post1",
    "0.5.4.post2",
    "0.5.4.post3",
    "0.5.5",
    "0.5.5.post1",
    "0.5.5.post2",
    "0.5.5.post3",
    "0.5.6",
    "0.5.6.post1",
    "0.5.6.post2",
    "0.5.7",
    "0.5.8",
    "0.5.8.post1",
    "0.5.9",
    "0.5.10",
    "0.5.10.post1",
    "0.5.11",
    "0.5.12",
    "0.5.12.post1",
    "0.5.13",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
GPUS = ((9, 0), (10, 0), (12, 0))

# The oracle names a function by where sglang imports it from, surgeon by what a person would call it.
LEAVES = {
    "sgl_kernel.topk_softmax": "sgl_kernel.topk_softmax",
    "sgl_kernel.moe_fused_gate": "sgl_kernel.moe_fused_gate",
    "sgl_kernel.kimi_k2_moe_fused_gate": "sgl_kernel.kimi_k2_moe_fused_gate",
    "flashinfer.fused_moe.fused_topk_deepseek": "fused_topk_deepseek (flashinfer)",
    "sglang.jit_kernel.grouped_topk.grouped_topk": "grouped_topk (JIT)",
    "sglang.jit_kernel.moe_fused_gate.moe_fused_gate": "moe_fused_gate (Triton)",
    "sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate": "moe_fused_gate (Triton)",
    "biased_grouped_topk_impl": "biased_grouped_topk_impl",
    "fused_topk_softmax_torch_raw_logits": "fused_topk_softmax_torch_raw_logits",
}


@dataclass(frozen=True)
class Comparison:
    """A release's cells on one GPU, compared.

    Attributes:
        cells: how many there are.
        refused: how many of them the release itself does not start.
        open: cells of which surgeon cannot tell the verdict, with what is missing.
        differing: what disagrees, in words.
    """

    cells: int
    refused: int
    open: tuple[tuple[dict[str, Any], str], ...]
    differing: tuple[str, ...]


def derive(version: str, capability: tuple[int, int], *, quick: bool = False) -> list[dict[str, Any]]:
    """What a release's own code does: the oracle's cells, from a process of their own.

    Args:
        version: the release.
        capability: the GPU's compute capability.
        quick: only some of the explicit runner backends.
    """
    command = [sys.executable, "-m", "tests.support.oracle", str(fetch(version)), "{}.{}".format(*capability)]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])], cwd=TOP, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def compare(version: str, capability: tuple[int, int], cells: list[dict[str, Any]]) -> Comparison:
    """Put surgeon's verdict beside each cell.

    Args:
        version: the release.
        capability: the GPU's compute capability.
        cells: what `derive` gave.
    """
    started = [cell for cell in cells if not cell["refused"]]
    undecided, differing = [], []
    for cell in started:
        declared, typed = QUANTIZATIONS[cell["quantization"]]
        config = {**MODELS[cell["model"]].config, **({"quantization_config": declared} if declared else {})}
        args = {"moe_runner_backend": cell["backend"], "quantization": typed}
        verdict = live_path(
            version, None, config, args | {"disable_shared_experts_fusion": not cell["fusion"]}, capability
        )
        if isinstance(verdict, CannotTell):
            undecided.append((cell, verdict.missing[0]))
            continue
        path = verdict.path
        said = {
            "selects": isinstance(verdict, Reached),
            "format": path.format,
            "backend": path.backend,
            "fused": path.fused,
            "leaf": path.leaf,
        }
        real = {
            "selects": cell["selects"],
            "format": cell["format"],
            "backend": cell["resolved_backend"],
            "fused": cell["fused"],
            "leaf": LEAVES.get(cell["leaf"], cell["leaf"]) if cell["leaf"] else None,
        }
        if path.fused is None:
            # Not known, and said so: then the leaf may be left open as well, but not wrong.
            del said["fused"], real["fused"]
            if path.leaf is None:
                del said["leaf"], real["leaf"]
        wrong = {name: (said[name], real[name]) for name in said if said[name] != real[name]}
        if wrong:
            asked = ("model", "quantization", "backend", "fusion")
            differing.append(f"{version} SM{capability[0]}0 {[cell[name] for name in asked]}: said, real: {wrong}")
    return Comparison(len(cells), len(cells) - len(started), tuple(undecided), tuple(differing))


def main() -> None:
    """Compare the releases named on the command line, or all of them, and print what came out."""
    total: Counter[str] = Counter()
    for version in sys.argv[1:] or RELEASES:
        for capability in GPUS:
            found = compare(version, capability, derive(version, capability))
            total.update(cells=found.cells, refused=found.refused, open=len(found.open), wrong=len(found.differing))
            print(version, capability, found.cells, "cells,", len(found.open), "open", flush=True)  # noqa: T201
            for line in found.differing:
                print("  ", line)  # noqa: T201
    print(dict(total))  # noqa: T201


if __name__ == "__main__":
    main()
