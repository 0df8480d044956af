"""Recordings as sglang's recorder writes them: by torch.save itself, in each mode, from counts that a test knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from surgeon import lab

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# The three forms, as sglang 0.5.9 and 0.5.23 write them (srt/eplb/expert_distribution.py). Counts of a `stat` file are
# summed over ranks. A per_token record has the ids of each layer, -1 where there is none.
_WRITER = """
import json, sys, torch
asked = json.load(sys.stdin)
steps = [torch.tensor(counts, dtype=torch.int32) for counts in asked["passes"]]
layers, experts = steps[0].shape
trivial = torch.arange(experts).repeat(layers, 1)
plain = dict(last_physical_to_logical_map=trivial)
torch.save(dict(records=[
    dict(forward_pass_id=7 + i, rank=0, gatherer_key="primary", global_physical_count=step)
    for i, step in enumerate(steps)
], **plain), asked["folder"] + "/per_pass.pt")
torch.save(dict(records=[
    dict(forward_pass_id=7 + i, rank=0, gatherer_key="primary", input_ids=[1] * rows, positions=[5] * rows,
         extend_seq_lens=None, forward_mode=mode, topk_ids_of_layer=torch.zeros(layers, rows, 8, dtype=torch.int32),
         misc_objects=[], global_physical_count=step.long())
    for i, (step, rows, mode) in enumerate(zip(steps, asked["rows"], asked["modes"]))
], **plain), asked["folder"] + "/per_token.pt")
ranks = asked["ranks"]
torch.save(dict(rank=0, logical_count=torch.stack([torch.zeros_like(steps[0]), *steps]) * ranks,
                average_utilization_rate_over_window=None), asked["folder"] + "/stat.pt")
torch.save(dict(records=[dict(forward_pass_id=1, global_physical_count=steps[0].t())]), asked["folder"] + "/view.pt")
torch.save(torch.nn.Linear(2, 2), asked["folder"] + "/module.pt")
torch.save(dict(weights=torch.ones(3)), asked["folder"] + "/weights.pt")
"""


def write(
    folder: Path,
    passes: Sequence[Sequence[Sequence[int]]],
    *,
    rows: Sequence[int],
    modes: Sequence[int],
    ranks: int = 2,
) -> None:
    """Write ``per_pass.pt``, ``per_token.pt`` and ``stat.pt`` of the same passes, and three files that are none.

    Args:
        folder: an existing one.
        passes: for each pass and layer, the tokens that each expert got.
        rows: tokens of each pass.
        modes: sglang's number of the forward mode of each pass (1 extend, 2 decode).
        ranks: over which ``stat`` sums.
    """
    asked = {"folder": str(folder), "passes": passes, "rows": rows, "modes": modes, "ranks": ranks}
    subprocess.run(
        [sys.executable, "-c", _WRITER],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(lab.torch_layer())},
        text=True,
        timeout=120,
        check=True,
    )
