"""A light map of the functions in topk.py that take part in choosing experts."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from surgeon.errors import DoesNotFitError
from surgeon.surgery.parse import Parsed, Unparsable, parse, split_lines
from surgeon.surgery.recipes import FUNCTION, called_name

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
        DoesNotFitError: the file is not Python.
    """
    parsed = parse(source)
    if isinstance(parsed, Unparsable):
        raise DoesNotFitError(
            parsed.reason,
            advice="Look whether the file is damaged.",
            where=f"line {parsed.line}" if parsed.line is not None else "",
            code="unparsable",
        )
    reader = _Reader(parsed)
    parsed.module.visit(reader)
    present = {entry.name for entry in reader.found}
    return tuple(_linked(entry, present, reader.aliases) for entry in reader.found)


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


class _Reader(cst.CSTVisitor):
    """Reads module-level functions, methods of module-level classes, and aliases of functions."""

    def __init__(self, parsed: Parsed) -> None:
        super().__init__()
        self.found: list[_Entry] = []
        self.aliases: dict[str, set[str]] = {}
        self._parsed = parsed
        self._class = ""
        self._line = 0
        self._definitions = self._definition_lines()

    def _definition_lines(self) -> dict[str, list[int]]:
        lines: dict[str, list[int]] = {}
        for number, line in enumerate(self._parsed.lines, 1):
            found = re.match(rb"\s*(?:async\s+)?def\s+(\w+)", line)
            if found is not None:
                lines.setdefault(found[1].decode("ascii", "replace"), []).append(number)
        return lines

    def on_visit(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.ClassDef():
                self._class = f"{node.name.value}."
            case cst.Assign():
                self._alias(node)
            case cst.FunctionDef():
                self._function(node)
                return False
        return not isinstance(node, cst.BaseExpression | cst.BaseSmallStatement)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.ClassDef):
            self._class = ""

    def _alias(self, node: cst.Assign) -> None:
        for target in node.targets:
            if isinstance(target.target, cst.Name):
                self.aliases.setdefault(target.target.value, set()).update(_meant(node.value))

    def _function(self, node: cst.FunctionDef) -> None:
        name = f"{self._class}{node.name.value}"
        role = next((role for role, pattern in _ROLES if pattern.fullmatch(name)), None)
        line = self._next_line(node.name.value)
        module = self._parsed.module
        decorators = tuple(module.code_for_node(d.decorator) for d in node.decorators)
        # A shape stub for torch.compile bears a kernel's name and computes nothing.
        if role is None or any("register_fake" in decorator for decorator in decorators):
            return
        bare = module.code_for_node(node.with_changes(leading_lines=(), lines_after_decorators=(), decorators=()))
        end = line + len(split_lines(bare.rstrip().encode("utf-8", "replace"))) - 1
        self.found.append(_Entry(name, role, line, end, decorators, _called(node)))

    def _next_line(self, name: str) -> int:
        """The line of the next definition of this name, in the file's order."""
        line = next((n for n in self._definitions.get(name, []) if n > self._line), self._line)
        self._line = line
        return line


def _meant(value: cst.BaseExpression) -> set[str]:
    match value:
        case cst.Name():
            return {value.value}
        case cst.IfExp():
            return _meant(value.body) | _meant(value.orelse)
        case _:
            return set()


def _called(node: cst.CSTNode) -> frozenset[str]:
    calls = _Calls()
    node.visit(calls)
    return frozenset(calls.names)


class _Calls(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Call):
            name = called_name(node)
            if name is not None:
                self.names.add(name)
        return True
