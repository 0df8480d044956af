"""What the server's own recorder saw: which experts each forward pass used.

sglang's expert-distribution recorder (0.5.23 runs it on the CPU, 0.5.9 does not) counts routed tokens per layer and
expert in every pass. It knows nothing of surgeon, so it proves a patch from outside. Here torch itself reads the
recordings, which tests hold ``surgeon.bench.torch_file`` against.
"""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from surgeon.bench.active import uniform as expected_active
from surgeon.bench.recording import Pass
from surgeon.errors import SurgeonError
from surgeon.lab import loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Pass", "expected_active", "mean_active", "read", "record"]

_READER = Path(__file__).with_name("recording_reader.py")
_READ_TIMEOUT_S = 300
_WRITE_TIMEOUT_S = 30.0
_POLL_S = 0.1


def record(
    port: int, folder: Path, work: Callable[[], object], *, python: Path, top_k: int, ranks: int = 1
) -> tuple[Pass, ...]:
    """Record what the server routes while some work is done.

    Args:
        port: the server's; it must run with ``--expert-distribution-recorder-mode per_pass``.
        folder: where the server's recorder writes (``SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR``).
        work: called once while the recorder runs.
        python: an interpreter with torch, to read the recording with.
        top_k: experts per token of the served model.
        ranks: tensor-parallel size.

    Returns:
        The passes of every rank, in order of rank and pass.

    Raises:
        SurgeonError: the server refused, or wrote less than one recording per rank.
    """
    before = set(folder.glob("*.pt"))
    loopback.post(port, "/start_expert_distribution_record")
    try:
        work()
    finally:
        loopback.post(port, "/stop_expert_distribution_record")
    loopback.post(port, "/dump_expert_distribution_record")
    # Rank 0 answers for all, while the others may still be writing.
    deadline = time.monotonic() + _WRITE_TIMEOUT_S
    while len(written := [file for file in set(folder.glob("*.pt")) - before if zipfile.is_zipfile(file)]) < ranks:
        if time.monotonic() > deadline:
            raise SurgeonError(
                f"The server's recorder wrote {len(written)} recordings; {ranks} were expected.",
                advice="It needs `--expert-distribution-recorder-mode per_pass`, which the lab gives sglang 0.5.23.",
                where=str(folder),
            )
        time.sleep(_POLL_S)
    return read(sorted(written), python=python, top_k=top_k)


def read(files: Sequence[Path], *, python: Path, top_k: int) -> tuple[Pass, ...]:
    """Read recordings, one file per rank.

    Args:
        files: ``.pt`` files that the recorder wrote, complete.
        python: an interpreter with torch.
        top_k: experts per token of the served model.

    Returns:
        The passes that routed anything, in order of rank and pass.

    Raises:
        SurgeonError: the files could not be read.
    """
    command = [str(python), "-I", str(_READER), *map(str, files)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_READ_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise SurgeonError(
            f"The recordings could not be read: {last[0]}",
            advice="The interpreter must be one that has torch, such as the lab's.",
            where=str(python),
        )
    passes = [_pass(item["pass"], item["rank"], item["counts"], top_k) for item in json.loads(done.stdout)]
    return tuple(sorted((found for found in passes if found.layers), key=lambda it: (it.rank, it.pass_id)))


def _pass(pass_id: int, rank: int, counts: list[list[int]], top_k: int) -> Pass:
    routed = [(index, tuple(layer)) for index, layer in enumerate(counts) if any(layer)]
    return Pass(
        pass_id=pass_id,
        rank=rank,
        rows=sum(routed[0][1]) // top_k if routed else 0,
        layers=tuple(index for index, _ in routed),
        counts=tuple(layer for _, layer in routed),
    )


def mean_active(passes: Sequence[Pass], *, rows: int = 16) -> float:
    """Mean number of active experts (T) over passes of one batch size and their layers.

    Args:
        passes: from `record` or `read`; those with another number of rows are left out.
        rows: tokens in the batch. Decode passes have one row per request in flight.

    Raises:
        SurgeonError: there is no pass of that size.
    """
    active = [count for found in passes if found.rows == rows for count in found.active]
    if not active:
        raise SurgeonError(
            f"No recorded pass has {rows} rows; found {sorted({found.rows for found in passes})}.",
            advice="Keep as many requests in flight as rows are wanted, and let them run longer.",
        )
    return fmean(active)
