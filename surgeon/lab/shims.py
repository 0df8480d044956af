"""Import shims of the lab's environments; copied there as ``surgeon_lab_shims`` and never put on a user's node.

sglang runs on the CPU, but imports things that only exist beside a GPU. The shims supply the least that lets those
imports pass, and act on import only, so that an interpreter that never imports torch pays next to nothing:

* ``sgl_kernel``: a stand-in whose submodules and names all resolve, and which raises when one is called.
* ``torchvision``: its compiled operators do not load beside a CPU torch. Its Python needs their schemas, not them.
* ``torch.cpu.is_current_stream_capturing``: sglang 0.5.23's recorder asks for it, torch 2.13 has none.

With ``SURGEON_LAB_FAULTS`` naming a JSON file, the shims also inject faults into the server's processes:
``{"unreadable": {"name": "settings.json", "process": 2}}`` makes files of that name unreadable in the second
process that the launcher started.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader, MetaPathFinder
    from types import ModuleType
    from typing import Any, NoReturn
else:
    # importlib.abc and typing would cost every start of the interpreter 40 ms.
    Loader = MetaPathFinder = object

_FAULTS_VARIABLE = "SURGEON_LAB_FAULTS"


class _NeedsGpu:
    """A name of ``sgl_kernel``: may be imported, read and annotated with, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _NeedsGpu:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NeedsGpu(f"{self._name}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        message = f"{self._name} needs a GPU; this is surgeon's CPU lab"
        raise RuntimeError(message)

    def __or__(self, other: object) -> object:
        return object

    __ror__ = __or__


class _StandInLoader(Loader):
    def create_module(self, _spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def resolve(name: str) -> _NeedsGpu:
            if name.startswith("__"):
                raise AttributeError(name)
            return _NeedsGpu(f"{module.__name__}.{name}")

        module.__getattr__ = resolve  # type: ignore[method-assign]


class _StandIns(MetaPathFinder):
    """Last in line: a real ``sgl_kernel`` wins."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(fullname, _StandInLoader(), is_package=True)


class _AfterLoader(Loader):
    """Runs a module as its own loader would, then completes it."""

    def __init__(self, loader: Loader, complete: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._complete = complete

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            # Resources and inspection ask the spec's loader; they should meet the real one.
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._complete(module)


class _AfterImport(MetaPathFinder):
    """First in line, for the few modules that are completed once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        complete = _COMPLETIONS.get(fullname)
        if complete is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoader(spec.loader, complete)
        return spec


def _complete_torch_cpu(module: ModuleType) -> None:
    if not hasattr(module, "is_current_stream_capturing"):
        module.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]


def _complete_torchvision(module: ModuleType) -> None:
    if getattr(module, "_HAS_OPS", False):
        return
    import torch  # only a process that imports torchvision pays for it

    # The library must outlive this call: the schemas go when it is collected.
    module._surgeon_lab_operators = library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[attr-defined] # noqa: SLF001 - a name of ours on their module
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    )


_COMPLETIONS: dict[str, Callable[[ModuleType], None]] = {
    "torch.cpu": _complete_torch_cpu,
    "torchvision.extension": _complete_torchvision,
}


def _forbidden(path: object) -> bool:
    """Whether the faults in force forbid this process to open that path."""
    if not isinstance(path, str | os.PathLike):
        return False
    import json

    try:
        with _real_open(os.environ[_FAULTS_VARIABLE], encoding="utf-8") as file:
            fault = json.load(file).get("unreadable")
    except (OSError, KeyError, ValueError):
        return False
    if not fault or os.path.basename(os.fspath(path)) != fault["name"]:  # noqa: PTH119 - as light as it gets
        return False
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.current_process().name.endswith(f"-{fault['process']}")


_real_open = builtins.open


def _inject_faults() -> None:
    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if _forbidden(path):
                raise PermissionError(13, "Permission denied (a fault of surgeon's lab)", path)
            return real(path, *args, **kwargs)

        return call

    builtins.open = io.open = guarded(_real_open)
    os.open = guarded(os.open)


sys.meta_path.insert(0, _AfterImport())
sys.meta_path.append(_StandIns())
if _FAULTS_VARIABLE in os.environ:
    _inject_faults()
