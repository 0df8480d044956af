"""Watches from outside which function of a running server's topk.py takes the top-k; put first on its PYTHONPATH.

It is named `sitecustomize` there. The installed file stays as it is: once its module is loaded, `select_experts` is
replaced by one that turns on Python's own profiler for the time of the call. The profiler tells every function of the
file that is entered, and in which of them torch's (or a kernel's) top-k is called. Each new answer is a line of JSON in
the file that SURGEON_TEST_TRACE names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, ModuleType

_MODULE = "sglang.srt.layers.moe.topk"
_PART = "topk"
_told: set[str] = set()


class _Watch:
    """One call of `select_experts`, as the profiler sees it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.entered: list[str] = []
        self.leaves: list[str] = []

    def event(self, frame: FrameType, kind: str, called: Any) -> None:
        """What `sys.setprofile` asks for."""
        if frame.f_code.co_filename != self.file:
            return
        if kind == "call":
            self.entered.append(frame.f_code.co_name)
        elif kind == "c_call" and _PART in str(getattr(called, "__name__", "")):
            self.leaves.append(frame.f_code.co_name)


def _watched(module: ModuleType) -> None:
    original = module.select_experts

    def select_experts(*words: Any, **named: Any) -> Any:
        watch = _Watch(str(module.__file__))
        caller = sys._getframe(1).f_code.co_qualname
        before = sys.getprofile()
        sys.setprofile(watch.event)
        try:
            return original(*words, **named)
        finally:
            sys.setprofile(before)
            _tell({"caller": caller, "entered": watch.entered, "leaves": watch.leaves})

    module.select_experts = select_experts  # type: ignore[attr-defined]


def _tell(seen: dict[str, Any]) -> None:
    line = json.dumps(seen)
    if line not in _told:
        _told.add(line)
        with open(os.environ["SURGEON_TEST_TRACE"], "a", encoding="utf-8") as file:  # noqa: PTH123 - starts often
            file.write(line + "\n")


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _watched(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
