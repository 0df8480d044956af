"""The places in sglang that surgeon knows how to cut into. What stands there, and where exactly, recipes say."""

from __future__ import annotations

from dataclasses import dataclass

from surgeon.surgery.outcomes import FUNCTION, IDS, LOGITS, WEIGHTS


@dataclass(frozen=True)
class Place:
    """One function of sglang, and how a call that is cut into it talks to it.

    Attributes:
        name: short name, shown to people.
        file: the module, below the folder of the package sglang.
        owner: the module-level class that the function is a method of; None if it stands at module level.
        function: its name.
        needs: its locals that the call gets, by position; they must be bound on every path to the site.
        assigns: its locals that the call's answer replaces, in order; empty if it has no answer.
    """

    name: str
    file: str
    owner: str | None
    function: str
    needs: tuple[str, ...]
    assigns: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The function as people write it: ``select_experts``, ``ModelRunner.forward``."""
        return f"{self.owner}.{self.function}" if self.owner else self.function


EXPERTS = Place(
    name="experts",
    file="srt/layers/moe/topk.py",
    owner=None,
    function=FUNCTION,
    needs=(WEIGHTS, IDS, LOGITS),
    assigns=(WEIGHTS, IDS),
)
"""Where experts have just been chosen, in every layer of every pass."""

FORWARD = Place(
    name="forward",
    file="srt/model_executor/model_runner.py",
    owner="ModelRunner",
    function="forward",
    needs=("self", "forward_batch"),
)
"""Where a pass begins, with the batch: its mode and its real number of rows, before any padding for a CUDA graph."""

PLACES = (EXPERTS, FORWARD)
