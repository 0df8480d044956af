"""Forward passes as sglang announces them, and a recording that replays tensor operations as a CUDA graph does."""

from __future__ import annotations

import ast
import enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.wheels import member

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_INFO = "sglang/srt/model_executor/forward_batch_info.py"


class Mode(enum.IntEnum):
    """A forward mode with the questions that every release answers."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5

    def is_decode(self) -> bool:
        """One token of each request."""
        return self == Mode.DECODE

    def is_target_verify(self) -> bool:
        """Drafts of each request, judged by the target model."""
        return self == Mode.TARGET_VERIFY


def modes_of(version: str) -> Any:
    """The real ForwardMode of a release, alone."""
    (found,) = (
        node
        for node in ast.parse(member(version, BATCH_INFO)).body
        if isinstance(node, ast.ClassDef) and node.name == "ForwardMode"
    )
    space: dict[str, Any] = {"IntEnum": enum.IntEnum, "auto": enum.auto}
    exec(compile(ast.Module([found], []), "forward_batch_info.py", "exec"), space)  # noqa: S102 - sglang's own code
    return space["ForwardMode"]


def batch_of(mode: Any, rows: int, **more: Any) -> SimpleNamespace:
    """What announce reads of a ForwardBatch."""
    return SimpleNamespace(**{"forward_mode": mode, "batch_size": rows, "input_ids": torch.zeros(rows), **more})


TARGET = SimpleNamespace(is_draft_worker=False)
DRAFT = SimpleNamespace(is_draft_worker=True)


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """Tensor operations, recorded once and replayed into the same memory, as a CUDA graph replays its kernels.

    While replaying, no line of the recorded function runs: what it decided in Python stays decided, and what it took
    from tensors is taken again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note it."""
        out = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run what was recorded again."""
        for func, args, kwargs, out in self._steps:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in _tensors(part)] if isinstance(value, (tuple, list)) else []
