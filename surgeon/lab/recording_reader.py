"""Prints recordings of sglang's expert-distribution recorder as JSON.

Run by a lab environment's interpreter, since a recording is a pickle of torch's:
``python -I recording_reader.py FILE...``. Prints a list of ``{"pass", "rank", "counts": [[int]]}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch


def main() -> None:
    """Print the passes of the recordings that the command line names."""
    passes = []
    for rank, name in enumerate(sys.argv[1:]):
        recording = torch.load(Path(name), map_location="cpu", weights_only=True)
        passes += [
            {
                "pass": int(record["forward_pass_id"]),
                "rank": rank,
                "counts": record["global_physical_count"].tolist(),
            }
            for record in recording["records"]
        ]
    json.dump(passes, sys.stdout)


if __name__ == "__main__":
    main()
