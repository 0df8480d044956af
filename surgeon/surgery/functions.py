"""A light map of the functions in topk.py that take part in choosing experts.

It is for people to read and nothing is cut by it, so the standard library's parser does: it knows lines and is four
times as quick as LibCST's tree is to walk.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.errors import DoesNotFitError
from surgeon.surgery.outcomes import FUNCTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# By name, in order: sglang's names say what a function runs on more reliably than its body does.
_ROLES = (
    ("dispatcher", re.compile(rf"{FUNCTION}|TopK\.forward_\w+|BypassedTopKOutput\.to_standard")),
    (
        "post-processing",
        re.compile(r"_post_process_\w+|\w*_postprocess|_mask_\w+|_zero_\w+|topk_ids_logical_to_physical"),
    ),
    ("CPU path", re.compile(r"\w*(?:fused|grouped)_topk_cpu")),
    ("fused kernel path", re.compile(r"\w*topk\w*_jit_kernel_impl")),
    ("torch path", re.compile(r"\w*topk\w*_(?:native|impl|torch_raw_logits)|grouped_topk(?:_gpu)?")),
    ("fused kernel path", re.compile(r"\w*topk\w*_(?:gpu|xpu)|fused_topk|\w*fused_gate")),
)


@dataclass(frozen=True)
class Function:
    """One function that takes part.

    Attributes:
        name: `Class.method` for a method.
        role: "dispatcher", "torch path", "fused kernel path", "CPU path" or "post-processing".
        line: of its `def`, counted from 1.
        end: its last line.
        decorators: as written, without the `@`.
        calls: the others on this map that it calls, by the name it calls them by; module-level aliases
            (`fused_topk = fused_topk_cpu`) are followed.
    """

    name: str
    role: str
    line: int
    end: int
    decorators: tuple[str, ...]
    calls: tuple[str, ...]


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
    found = [entry for prefix, node in _definitions(tree.body) if (entry := _entry(prefix, node)) is not None]
    aliases = _aliases(tree.body)
    present = {entry.name for entry in found}
    return tuple(_linked(entry, present, aliases) for entry in found)


@dataclass(frozen=True, eq=False)
class _Entry:
    name: str
    role: str
    line: int
    end: int
    decorators: tuple[str, ...]
    called: frozenset[str]


def _linked(entry: _Entry, present: set[str], aliases: dict[str, set[str]]) -> Function:
    calls = set()
    for name in entry.called:
        calls |= ({name} | aliases.get(name, set())) & present
    return Function(
        entry.name, entry.role, entry.line, entry.end, entry.decorators, tuple(sorted(calls - {entry.name}))
    )


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the level of a body, those in branches included; functions and classes are not entered."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _definitions(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Module-level functions and methods of module-level classes."""
    for statement in _statements(body):
        if isinstance(statement, ast.FunctionDef):
            yield prefix, statement
        elif isinstance(statement, ast.ClassDef):
            yield from _definitions(statement.body, f"{statement.name}.")


def _entry(prefix: str, node: ast.FunctionDef) -> _Entry | None:
    name = f"{prefix}{node.name}"
    role = next((role for role, pattern in _ROLES if pattern.fullmatch(name)), None)
    if role is None:
        return None
    decorators = tuple(ast.unparse(decorator) for decorator in node.decorator_list)
    # A shape stub for torch.compile bears a kernel's name and computes nothing.
    if any("register_fake" in decorator for decorator in decorators):
        return None
    return _Entry(name, role, node.lineno, node.end_lineno or node.lineno, decorators, _called(node))


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


def _called(node: ast.FunctionDef) -> frozenset[str]:
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            if isinstance(inner.func, ast.Name):
                names.add(inner.func.id)
            elif isinstance(inner.func, ast.Attribute):
                names.add(inner.func.attr)
    return frozenset(names)
