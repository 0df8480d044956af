"""Which of a wheel's model files run experts that topk.py did not choose, or give it a routing function."""

from __future__ import annotations

import ast
import functools
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MODELS = "sglang/srt/models/"
# Names that stand for topk.py's choice; up to 0.4.9 the MoE layers and `fused_moe` make it themselves.
_CHOOSES = {"TopK", "HashTopK", "select_experts"}
_RUNS = {"FusedMoE", "EPMoE", "DeepEPMoE", "get_moe_impl_class", "fused_moe", "fused_experts"}


@dataclass(frozen=True)
class ModelFile:
    """What one file of sglang/srt/models uses.

    Attributes:
        names: every name called or inherited from in it.
        imports: the other model files it imports from.
        architectures: the classes that it registers.
        routing: whether it passes a custom routing function.
    """

    names: frozenset[str]
    imports: frozenset[str]
    architectures: tuple[str, ...]
    routing: bool


@functools.cache
def model_files(wheel: Path) -> dict[str, ModelFile]:
    """Every model file of a wheel, by module name below sglang.srt.models."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.startswith(_MODELS) and name.endswith(".py")]
        return {_module(name): _read(_module(name), archive.read(name)) for name in found}


def own_routers(wheel: Path) -> dict[str, str]:
    """Architectures whose experts run in a MoE layer, and that reach nothing of topk.py's that chooses.

    Returns:
        The model file of each.
    """
    files = model_files(wheel)
    found: dict[str, str] = {}
    for name, file in files.items():
        names = _reach(name, files, set())
        if names & _RUNS and not names & _CHOOSES:
            found |= dict.fromkeys(file.architectures, name)
    return found


def own_routing_functions(wheel: Path) -> dict[str, str]:
    """Architectures whose own file passes a custom routing function.

    Returns:
        The model file of each.
    """
    files = model_files(wheel)
    return {one: name for name, file in files.items() if file.routing for one in file.architectures}


def _module(path: str) -> str:
    return path.removeprefix(_MODELS).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _reach(name: str, files: dict[str, ModelFile], seen: set[str]) -> set[str]:
    if name in seen or name not in files:
        return set()
    seen.add(name)
    file = files[name]
    return set(file.names).union(*(_reach(one, files, seen) for one in file.imports))


def _read(name: str, source: bytes) -> ModelFile:
    names: set[str] = set()
    imports: set[str] = set()
    architectures: tuple[str, ...] = ()
    routing = False
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Call():
                names |= {_last(node.func)}
                routing |= any(word.arg == "custom_routing_function" for word in node.keywords)
            case ast.ClassDef():
                names |= {_last(base) for base in node.bases}
            case ast.ImportFrom():
                imports |= _imported(name, node)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == "EntryClass" for one in targets):
            architectures = tuple(
                one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id != "EntryClass"
            )
    return ModelFile(frozenset(names), frozenset(imports), architectures, routing)


def _last(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Call():
            return _last(node.func)
    return ""


def _imported(name: str, node: ast.ImportFrom) -> set[str]:
    module = node.module or ""
    if node.level:
        parent = name.split(".")[: -node.level]
        module = ".".join([*parent, *([module] if module else [])])
    elif module == "sglang.srt.models" or module.startswith("sglang.srt.models."):
        module = module.removeprefix("sglang.srt.models").lstrip(".")
    else:
        return set()
    return {module} | {f"{module}.{one.name}".lstrip(".") for one in node.names}
