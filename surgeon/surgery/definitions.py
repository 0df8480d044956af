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


# torch.compile and what is called after it; not torch.compiler.disable, which does the opposite.
_COMPILES = re.compile(r"(?:\b|_)compiled?(?:\b|_)|\bjit\.(?:script|trace)\b|\bdynamo\.optimize\b")


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
    again = list(_bindings(module.statements, place.label))
    if again:
        shown = (*_binding_lines(inside, place.function), *_binding_lines(module, re.escape(place.label)))
        compiled = _compiled(parsed, place.label, again)
        if compiled:
            return NotFound(compiled, (f"def {place.function}",), shown)
        return Ambiguous(f"`{place.label}` is bound again at module level; one definition is expected.", shown)
    return Definition(method.node, method.body, parsed.start_in(owner.node, top, method.node), owner.node, top)


def _one(scope: _Scope, name: str, kind: type[_Node]) -> _One[_Node] | NotFound | Ambiguous:
    bindings = list(_bindings(scope.statements, name))
    what, keyword = ("class", "class") if kind is cst.ClassDef else ("function", "def")
    expected = (f"{keyword} {name}",)
    if not bindings:
        nested = _matching(scope, rf"\s*(?:async\s+)?{keyword}\s+{name}\b")
        if nested:
            reason = f"`{name}` is defined inside another function or class; a {what} {scope.title} is expected."
            return NotFound(reason, expected, nested)
        where = "The file" if scope.title == "at module level" else scope.title.removeprefix("in ").capitalize()
        return NotFound(f"{where} defines no {what} `{name}`.", expected, _alike(scope, name, keyword))
    lines = _binding_lines(scope, name)
    compiled = _compiled(scope.parsed, name, bindings)
    if compiled:
        return NotFound(compiled, expected, lines)
    if len(bindings) > 1:
        return Ambiguous(f"`{name}` is bound {len(bindings)} times {scope.title}; one is expected.", lines)
    hidden = _hidden(scope, name)
    if hidden:
        return Ambiguous(f"`{name}` is bound again by `:=` or as a global; one definition is expected.", hidden)
    node = bindings[0]
    index = next((i for i, statement in enumerate(scope.statements) if statement is node), None)
    if isinstance(node, kind) and index is not None and isinstance(node.body, cst.IndentedBlock):
        reason = _unfit(node)
        if not reason:
            return _One(index, node, node.body)
    elif isinstance(node, kind):
        where = "inside another block" if index is None else "on one line"
        reason = f"is defined {where}; a {what} {scope.title}, with a body in lines of its own, is expected"
    elif isinstance(node, cst.FunctionDef | cst.ClassDef):
        reason = f"is no {what}; a {what} {scope.title} is expected"
    else:
        reason = "is not defined in this file but bound to something from elsewhere"
    return NotFound(f"`{name}` {reason}.", expected, lines)


def _unfit(node: cst.FunctionDef | cst.ClassDef) -> str:
    """Why nothing can be cut into a definition; empty if something can."""
    if node.decorators:
        return "is decorated; what its decorator makes of new statements is not known"
    if isinstance(node, cst.FunctionDef) and node.asynchronous is not None:
        return "is a coroutine; a plain function is expected"
    if isinstance(node, cst.FunctionDef) and _yields(node.body):
        return "is a generator; a function whose body runs when it is called is expected"
    return ""


def _compiled(parsed: Parsed, name: str, bindings: Sequence[cst.CSTNode]) -> str:
    """Why a name stands for compiled code: by a decorator, or because it is bound to what a compiler made of it."""
    for node in bindings:
        written: list[cst.CSTNode] = []
        match node:
            case cst.FunctionDef() | cst.ClassDef():
                written = [decorator.decorator for decorator in node.decorators]
            case cst.SimpleStatementLine() | cst.SimpleStatementSuite():
                written = [small.value for small in node.body if isinstance(small, cst.Assign)]
        for code in (" ".join(parsed.module.code_for_node(one).split()) for one in written):
            if _COMPILES.search(code):
                return (
                    f"`{name}` is compiled, by `{code}`: what is cut into a compiled region cannot be trusted to be "
                    "read again, nor to be switched while the server runs."
                )
    return ""


class _Yields(cst.CSTVisitor):
    """Whether a body yields, functions and classes inside it left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.found = self.found or isinstance(node, cst.Yield)
        return not isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Lambda)


def _yields(body: cst.BaseSuite) -> bool:
    visitor = _Yields()
    body.visit(visitor)
    return visitor.found


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
                if name in _bound_by_head(statement):
                    yield statement
                suites = (child for child in statement.children if not isinstance(child, cst.BaseExpression))
                yield from _bindings(list(suites), name)


def _bound_by(small: cst.BaseSmallStatement) -> set[str]:
    targets: list[cst.BaseExpression]
    match small:
        case cst.Assign():
            targets = [target.target for target in small.targets]
        case cst.AnnAssign() | cst.AugAssign() | cst.Del():
            targets = [small.target]
        case cst.Import(names=names):
            return {(alias.evaluated_alias or alias.evaluated_name).partition(".")[0] for alias in names}
        case cst.ImportFrom(names=names) if not isinstance(names, cst.ImportStar):
            return {alias.evaluated_alias or alias.evaluated_name for alias in names}
        case _:
            return set()
    return {name for target in targets for name in _targets(target)}


def _bound_by_head(statement: cst.CSTNode) -> set[str]:
    """What the head of a compound statement binds: `for x in`, `with y as x`, `except E as x`."""
    match statement:
        case cst.For(target=target):
            return set(_targets(target))
        case cst.With(items=items):
            return {name for item in items if item.asname is not None for name in _targets(item.asname.name)}
        case cst.ExceptHandler(name=cst.AsName(name=target)):
            return set(_targets(target))
        case _:
            return set()


def _targets(node: cst.BaseExpression) -> Iterator[str]:
    """The names that an assignment to this binds, dotted ones as written."""
    match node:
        case cst.Tuple(elements=elements) | cst.List(elements=elements):
            for element in elements:
                yield from _targets(element.value)
        case _:
            name = _dotted(node)
            if name:
                yield name


class _Hidden(cst.CSTVisitor):
    """Whether a name of the module is bound inside an expression, or by a function that declares it global."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.found = False
        self._name = name

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:  # noqa: N802 - LibCST names it
        self.found = self.found or _dotted(node.target) == self._name

    def visit_Global(self, node: cst.Global) -> None:  # noqa: N802 - LibCST names it
        self.found = self.found or any(item.name.value == self._name for item in node.names)


def _hidden(scope: _Scope, name: str) -> tuple[Line, ...]:
    """Where a name is bound by `:=` or declared global; the tree is walked only where the text suggests it."""
    suspects = _matching(scope, rf".*(?:\b{re.escape(name)}\s*:=|\bglobal\b.*\b{re.escape(name)}\b)")
    if not suspects:
        return ()
    visitor = _Hidden(name)
    for statement in scope.statements:
        statement.visit(visitor)
    return suspects if visitor.found else ()


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
        rf"\s*(?:(?:async\s+)?def|class)\s+{name}\b|[^#]*\b{name}\b[^#=()]*=[^=]|.*\bimport\b.*\b{name}\b"
        rf"|\s*(?:for|del)\s[^#]*\b{name}\b|\s*(?:with|except)\b[^#]*\bas\b[^#]*\b{name}\b",
    )


def _alike(scope: _Scope, name: str, keyword: str) -> tuple[Line, ...]:
    lines = _matching(scope, rf"\s*(?:async\s+)?{keyword}\s+\w+")
    names = {re.split(r"\W", line.text.split(keyword, 1)[1].strip())[0]: line for line in lines}
    return tuple(names[match] for match in difflib.get_close_matches(name, names, n=3, cutoff=0.5))


def _matching(scope: _Scope, pattern: str) -> tuple[Line, ...]:
    matcher = re.compile(pattern)
    numbered = (Line(number, scope.parsed.text(number)) for number in scope.lines)
    return tuple(line for line in numbered if matcher.match(line.text))
