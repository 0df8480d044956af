"""The CPU lab for tests: brought up on first use, loaded, and watched through the server's own recorder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.lab import lifecycle, loopback, recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from surgeon.lab.lifecycle import Description
    from surgeon.lab.recorder import Pass


def running(*, sglang: str = "0.5.23", ranks: int = 1, bias: float = 0.0, fresh: bool = False) -> Description:
    """Bring up the lab that a test needs, in the cache in force; quick when it is the one that runs."""
    wanted = lifecycle.Wanted(sglang=sglang, ranks=ranks, bias=bias)
    return lifecycle.up(wanted, fresh=fresh).description


def generate(port: int, n: int, input_len: int = 64, max_new_tokens: int = 32, seed: int = 0) -> list[int]:
    """Have n sampled requests with random prompts in flight; the server's completion tokens of each."""
    done = loopback.generate(port, n, input_len=input_len, max_new_tokens=max_new_tokens, seed=seed, temperature=1.0)
    return [completion.tokens for completion in done]


def record(lab: Description, work: Callable[[], object]) -> tuple[Pass, ...]:
    """What the server's recorder saw while some work was done."""
    return recorder.record(
        lab.port,
        Path(lab.recordings),
        work,
        python=Path(lab.python),
        top_k=lab.top_k,
        ranks=lab.wanted.ranks,
    )
