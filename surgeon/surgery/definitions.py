"""The one definition of a place's function in a file, or why there is none that a call could be cut into."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import libcst as cst

from surgeon.surgery.outcomes import Ambiguous, Line, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from surgeon.surgery.parse import Parsed
    from surgeon.surgery.places import Place


@dataclass(frozen=True, eq=False)
class Definition:
    """The function of a place, and where it stands.

    Attributes:
        function: its node.
        body: its block.
        top: lines above it, its leading comments not counted.
        owner: the class that it is a method of, and that class's block; None if it stands at module level.
        owner_top: lines above the class, or above the function where there is none.
    """

    function: cst.FunctionDef
    body: cst.IndentedBlock
    top: int
    owner: cst.ClassDef | None
    owner_top: int

    @property
    def outer(self) -> cst.FunctionDef | cst.ClassDef:
        """The statement at module level that it is, or that holds it."""
        return self.function if self.owner is None else self.owner


@dataclass(frozen=True, eq=False)
class _Scope:
    """Where a name is looked for: the module, or a class."""

    parsed: Parsed
    statements: Sequence[cst.CSTNode]
    title: str
    # The lines it takes, counted from 1.
    lines: range


_Node = TypeVar("_Node", cst.FunctionDef, cst.ClassDef)


@dataclass(frozen=True, eq=False)
class _One(Generic[_Node]):
    """The only statement of a scope that binds a name."""

    index: int
    node: _Node
    body: cst.IndentedBlock


def find_definition(parsed: Parsed, place: Place) -> Definition | NotFound | Ambiguous:
    """Look for the place's function.

    Args:
        parsed: the file.
        place: whose function it is.
    """
    module = _Scope(parsed, parsed.module.body, "at module level", range(1, len(parsed.lines) + 1))
    if place.owner is not None:
        return _method(module, place, place.owner)
    function = _one(module, place.function, cst.FunctionDef)
    if not isinstance(function, _One):
        return function
    top = parsed.start(function.index)
    return Definition(function.node, function.body, top, None, top)


def _method(module: _Scope, place: Place, name: str) -> Definition | NotFound | Ambiguous:
    parsed = module.parsed
    owner = _one(module, name, cst.ClassDef)
    if not isinstance(owner, _One):
        return owner
    top = parsed.start(owner.index)
    first = top + len(owner.node.leading_lines) + 1
    length = len(parsed.module.code_for_node(owner.node.with_changes(leading_lines=())).splitlines())
    lines = range(first, min(first + length, len(parsed.lines) + 1))
    inside = _Scope(parsed, owner.body.body, f"in class `{name}`", lines)
    method = _one(inside, place.function, cst.FunctionDef)
    if not isinstance(method, _One):
        return method
    if any(True for _ in _bindings(module.statements, place.label)):
        shown = (*_binding_lines(inside, place.function), *_binding_lines(module, re.escape(place.label)))
        return Ambiguous(f"`{place.label}` is bound again at module level; one definition is expected.", shown)
    return Definition(method.node, method.body, parsed.start_in(owner.node, top, method.node), owner.node, top)


def _one(scope: _Scope, name: str, kind: type[_Node]) -> _One[_Node] | NotFound | Ambiguous:
    bindings = list(_bindings(scope.statements, name))
    what, keyword = ("class", "class") if kind is cst.ClassDef else ("function", "def")
    expected = (f"{keyword} {name}",)
    if not bindings:
        where = "The file" if scope.title == "at module level" else scope.title.removeprefix("in ").capitalize()
        return NotFound(f"{where} defines no {what} `{name}`.", expected, _alike(scope, name, keyword))
    lines = _binding_lines(scope, name)
    if len(bindings) > 1:
        return Ambiguous(f"`{name}` is bound {len(bindings)} times {scope.title}; one is expected.", lines)
    node = bindings[0]
    index = next((i for i, statement in enumerate(scope.statements) if statement is node), None)
    if isinstance(node, cst.FunctionDef | cst.ClassDef) and not isinstance(node, kind):
        reason = f"`{name}` is no {what}; a {what} {scope.title} is expected."
    elif not isinstance(node, kind):
        reason = f"`{name}` is not defined in this file but bound to something from elsewhere."
    elif index is None:
        reason = f"`{name}` is defined inside another block; a {what} {scope.title} is expected."
    elif node.decorators:
        reason = f"`{name}` is decorated; what its decorator makes of new statements is not known."
    elif isinstance(node, cst.FunctionDef) and node.asynchronous is not None:
        reason = f"`{name}` is a coroutine; a plain function is expected."
    elif not isinstance(node.body, cst.IndentedBlock):
        reason = f"`{name}` stands on one line; a body in lines of its own is expected."
    else:
        return _One(index, node, node.body)
    return NotFound(reason, expected, lines)


def _bindings(statements: Sequence[cst.CSTNode], name: str) -> Iterator[cst.CSTNode]:
    """Statements that bind a name in a scope, conditional ones too; functions and classes are not entered."""
    for statement in statements:
        match statement:
            case cst.FunctionDef() | cst.ClassDef():
                if statement.name.value == name:
                    yield statement
            case cst.SimpleStatementLine() | cst.SimpleStatementSuite():
                yield from (statement for small in statement.body if name in _bound_by(small))
            case cst.CSTNode():
                suites = (child for child in statement.children if not isinstance(child, cst.BaseExpression))
                yield from _bindings(list(suites), name)


def _bound_by(small: cst.BaseSmallStatement) -> set[str]:
    match small:
        case cst.Assign():
            targets = [target.target for target in small.targets]
        case cst.AnnAssign() | cst.AugAssign():
            targets = [small.target]
        case cst.ImportFrom(names=names) if not isinstance(names, cst.ImportStar):
            return {alias.evaluated_alias or alias.evaluated_name for alias in names}
        case _:
            return set()
    return {name for target in targets if (name := _dotted(target))}


def _dotted(node: cst.BaseExpression) -> str:
    """`a` or `a.b` as written, empty for any other expression."""
    match node:
        case cst.Name(value=name):
            return str(name)
        case cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value=attribute)):
            return f"{name}.{attribute}"
        case _:
            return ""


def _binding_lines(scope: _Scope, name: str) -> tuple[Line, ...]:
    return _matching(
        scope,
        rf"\s*(?:(?:async\s+)?def|class)\s+{name}\b|[^#]*\b{name}\s*=[^=]|.*\bimport\b.*\b{name}\b",
    )


def _alike(scope: _Scope, name: str, keyword: str) -> tuple[Line, ...]:
    lines = _matching(scope, rf"\s*(?:async\s+)?{keyword}\s+\w+")
    names = {re.split(r"\W", line.text.split(keyword, 1)[1].strip())[0]: line for line in lines}
    return tuple(names[match] for match in difflib.get_close_matches(name, names, n=3, cutoff=0.5))


def _matching(scope: _Scope, pattern: str) -> tuple[Line, ...]:
    matcher = re.compile(pattern)
    numbered = (Line(number, scope.parsed.text(number)) for number in scope.lines)
    return tuple(line for line in numbered if matcher.match(line.text))
