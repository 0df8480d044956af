"""A light map of the functions in topk.py that take part in choosing experts, and of the kernels that they call.

It is for people to read and nothing is cut by it, so the standard library's parser does: it knows lines and is four
times as quick as LibCST's tree is to walk.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from surgeon.errors import DoesNotFitError
from surgeon.surgery.outcomes import FUNCTION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DISPATCHER = "dispatcher"
POST_PROCESSING = "post-processing"
CPU_PATH = "CPU path"
TORCH_PATH = "torch path"
KERNEL_PATH = "fused kernel path"
KERNEL = "fused kernel"
SIMULATION = "simulation"
MODELS_OWN = "the model's own"

# By name, in order: sglang's names say what a function runs on more reliably than its body does. Read from the wheels
# of 0.4.6 to 0.5.23; tests/surgery/test_functions.py holds each role against the bodies.
_ROLES = (
    (
        DISPATCHER,
        re.compile(
            rf"{FUNCTION}|TopK\.forward_\w+|TopK\.bind_runner_backend|_can_bypass_\w+"
            r"|BypassedTopKOutput\.to_standard|build_precomputed_topk_output"
        ),
    ),
    (SIMULATION, re.compile(r"apply_routing_simulation|_simulate_balanced_routing|_make_round_robin_expert_ids")),
    (
        POST_PROCESSING,
        re.compile(
            r"_post_process_\w+|\w*_postprocess|_mask_\w+|_zero_\w+|_?remap_topk_\w+|capture_routed_experts_\w+"
            r"|_fill_padded_rows"
        ),
    ),
    (CPU_PATH, re.compile(r"\w*(?:fused|grouped)_topk_cpu")),
    (KERNEL_PATH, re.compile(r"\w*topk\w*_jit_kernel_impl")),
    (TORCH_PATH, re.compile(r"\w*topk\w*_(?:native|impl|torch_raw_logits)|grouped_topk(?:_gpu)?")),
    (KERNEL_PATH, re.compile(r"\w*topk\w*_(?:gpu|xpu)|fused_topk(?:_deepseek)?|biased_grouped_topk|routing")),
)

# What is imported has many names over the releases; what they have in common are these parts.
_KERNEL_PARTS = {"topk", "gate", "gating", "route", "routing"}
_POST_PROCESSING = re.compile(r"\w*topk_ids\w*|fused_append_\w*shared_experts\w*|eplb_map_and_record_\w+")
# A field of TopKConfig, or a parameter, that the model fills.
_CUSTOM = "custom_routing_function"
_COMPILE = "torch.compile"


@dataclass(frozen=True)
class Imported:
    """A function from elsewhere that takes part.

    Attributes:
        name: where it comes from; `topk_softmax`, whatever topk.py calls it.
        modules: where it comes from; several if the device decides (`sgl_kernel` or MUSA's own), none for the
            function that a model brings.
        role: "fused kernel", "post-processing" or "the model's own".
    """

    name: str
    modules: tuple[str, ...]
    role: str


@dataclass(frozen=True)
class Function:
    """One function of topk.py that takes part.

    Attributes:
        name: `Class.method` for a method.
        role: "dispatcher", "torch path", "fused kernel path", "CPU path", "post-processing" or "simulation" (routing
            that is made up for load tests).
        line: of its `def`, counted from 1.
        end: its last line.
        decorators: as written, without the `@`.
        called: what it calls, or hands on to be called (`torch.compile(this)`), in the order in which it names them:
            others on this map by their names, through module-level aliases (`fused_topk = fused_topk_cpu`); and what
            it imports from elsewhere.
        compiled: torch.compile is its decorator, or is called on it by another function of the file.
    """

    name: str
    role: str
    line: int
    end: int
    decorators: tuple[str, ...]
    called: tuple[str | Imported, ...]
    compiled: bool = False

    @property
    def calls(self) -> tuple[str, ...]:
        """The others on the map that it calls."""
        return tuple(one for one in self.called if isinstance(one, str))

    @property
    def imported(self) -> tuple[Imported, ...]:
        """What it calls from elsewhere."""
        return tuple(one for one in self.called if isinstance(one, Imported))


def functions(source: bytes) -> tuple[Function, ...]:
    """Map the functions that choose experts, in the file's order.

    Args:
        source: topk.py, patched or not.

    Raises:
        DoesNotFitError: the file is not Python that this interpreter can read.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise DoesNotFitError(
            f"The file cannot be read as Python: {error}",
            advice="Look whether the file is damaged.",
            where=f"line {line}" if line else "",
            code="unparsable",
        ) from error
    found = [entry for owner, node in _definitions(tree.body) if (entry := _entry(owner, node)) is not None]
    present = {entry.name for entry in found}
    aliases = _aliases(tree.body)
    origins = _imports(_statements(tree.body))
    compiled = {name for entry in found for name in entry.body.compiled}
    return tuple(_linked(entry, present, aliases, origins, compiled) for entry in found)


_Origins: TypeAlias = dict[str, list[tuple[str, str]]]
"""What a module's names were imported as: (module, name there), in order; the name is empty for a module."""


@dataclass(frozen=True, eq=False)
class _Entry:
    name: str
    role: str
    node: ast.FunctionDef
    decorators: tuple[str, ...]
    body: _Body


@dataclass(frozen=True, eq=False)
class _Body:
    """What one walk through a function sees.

    Attributes:
        read: dotted names, each whole, in order.
        bound: the names that the function binds itself: they are not the module's.
        imports: the statements that import.
        compiled: the names that are handed to torch.compile, as sglang did up to 0.4.9.
    """

    read: list[str]
    bound: set[str]
    imports: list[ast.stmt]
    compiled: set[str]


def _entry(owner: str, node: ast.FunctionDef) -> _Entry | None:
    name = f"{owner}{node.name}"
    role = next((role for role, pattern in _ROLES if pattern.fullmatch(name)), None)
    if role is None:
        return None
    decorators = tuple(ast.unparse(decorator) for decorator in node.decorator_list)
    # A shape stub for torch.compile bears a kernel's name and computes nothing.
    if any("register_fake" in decorator for decorator in decorators):
        return None
    return _Entry(name, role, node, decorators, _body(node))


def _body(function: ast.FunctionDef) -> _Body:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    seen = _Body([], {argument.arg for argument in every}, [], set())
    # Depth first and in order, by hand: the file has ten thousands of nodes, and people wait.
    waiting: list[ast.AST] = [*reversed(function.body)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute) and (name := _dotted(node)) is not None:
            if isinstance(node.ctx, ast.Load):
                seen.read.append(name)
            elif isinstance(node, ast.Name):
                seen.bound.add(name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            seen.imports.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _CUSTOM:
            seen.read.append(f"{_CUSTOM}()")
        elif isinstance(node, ast.Call) and _dotted(node.func) == _COMPILE:
            seen.compiled.update(one.id for one in node.args[:1] if isinstance(one, ast.Name))
        waiting += [*ast.iter_child_nodes(node)][::-1]
    return seen


def _linked(
    entry: _Entry, present: set[str], aliases: dict[str, set[str]], origins: _Origins, compiled: set[str]
) -> Function:
    local = _imports(entry.body.imports)
    bound = entry.body.bound - set(local)
    owner = entry.name.rpartition(".")[0]
    called: dict[str | Imported, None] = {}
    for read in entry.body.read:
        name = f"{owner}.{read.removeprefix('self.')}" if owner and read.startswith("self.") else read
        root, _, attribute = name.partition(".")
        if root == f"{_CUSTOM}()":
            called.setdefault(Imported(_CUSTOM, (), MODELS_OWN))
        elif root in bound:
            continue
        elif root not in local and (meant := ({name} | aliases.get(name, set())) & present):
            called |= dict.fromkeys(sorted(meant - {entry.name}))
        elif (one := _from_elsewhere(root, attribute, local.get(root) or origins.get(root, []))) is not None:
            called.setdefault(one)
    node = entry.node
    return Function(
        name=entry.name,
        role=entry.role,
        line=node.lineno,
        end=node.end_lineno or node.lineno,
        decorators=entry.decorators,
        called=tuple(called),
        compiled=entry.name in compiled or any(d.startswith(_COMPILE) for d in entry.decorators),
    )


def _from_elsewhere(root: str, attribute: str, origins: list[tuple[str, str]]) -> Imported | None:
    """What a name that is not of this file is, if it takes part.

    Args:
        root: the name up to its first dot.
        attribute: what follows; empty if nothing does.
        origins: where the root was imported from.
    """
    if root == "torch" and attribute.startswith("ops."):
        namespace, _, name = attribute.rpartition(".")
        role = _imported_role(name)
        return Imported(name, (f"torch.{namespace}",), role) if role else None
    if root == "torch" or attribute.count("."):
        return None
    wholes = [(f"{module}.{name}" if name and attribute else module, attribute or name) for module, name in origins]
    names = {name for _, name in wholes}
    name = names.pop() if len(names) == 1 else root
    role = _imported_role(name)
    return Imported(name, tuple(dict.fromkeys(module for module, _ in wholes)), role) if wholes and role else None


def _imported_role(name: str) -> str | None:
    if _POST_PROCESSING.fullmatch(name):
        return POST_PROCESSING
    return KERNEL if _KERNEL_PARTS & set(name.split("_")) else None


def _dotted(node: ast.expr) -> str | None:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            base = _dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
    return None


def _imports(statements: Iterable[ast.stmt]) -> _Origins:
    found: _Origins = {}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                origin = (f"{'.' * statement.level}{statement.module or ''}", alias.name)
                names = found.setdefault(alias.asname or alias.name, [])
                names += [origin] if origin not in names else []
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                found.setdefault(alias.asname or alias.name.partition(".")[0], []).append((alias.name, ""))
    return found


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the level of a body, those in branches included; functions and classes are not entered."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _definitions(body: Sequence[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Module-level functions and methods of module-level classes."""
    for statement in _statements(body):
        if isinstance(statement, ast.FunctionDef):
            yield owner, statement
        elif isinstance(statement, ast.ClassDef):
            yield from _definitions(statement.body, f"{statement.name}.")


def _aliases(body: Sequence[ast.stmt]) -> dict[str, set[str]]:
    aliases: dict[str, set[str]] = {}
    for statement in _statements(body):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    aliases.setdefault(target.id, set()).update(_meant(statement.value))
    return aliases


def _meant(value: ast.expr) -> set[str]:
    match value:
        case ast.Name():
            return {value.id}
        case ast.IfExp():
            return _meant(value.body) | _meant(value.orelse)
        case _:
            return set()
