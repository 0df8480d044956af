"""Does sglang itself choose experts with an eye to the batch by now, so that the patch is not needed?

No release up to 0.5.23 does. Two signs are looked for, both in topk.py and both in code, never in comments:

- a name that says so, as a field of `TopKConfig`, a parameter of `select_experts`, or something read in it:
  `oea_k0`, `enable_batch_aware_routing`, `opportunistic_expert_activation`;
- the method's shape, in `select_experts` or in a function of the file that it calls: the experts chosen are brought
  together over the rows of the batch (`any`, `sum`, `amax` over dimension 0, `unique`, `bincount`, or a scatter into
  one vector), what comes of it meets the router's scores in a second top-k, and its choice is the answer. A count of
  the chosen experts, for statistics or for picking among copies of an expert, is not that.

A miss costs a patch on top of upstream's own, which a person sees in its settings; a false alarm would refuse a patch
that is wanted. So anything less than these signs is none, and so is a file that Python's own parser cannot read.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import TYPE_CHECKING

from surgeon.surgery.outcomes import FUNCTION, IDS, Line, NotNeeded
from surgeon.surgery.text import split_bom, split_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CONFIG = "TopKConfig"
_OVER_ROWS = {"any", "sum", "amax", "max", "count_nonzero"}
_DISTINCT = {"unique", "unique_consecutive", "bincount", "histc"}
_INTO_ONE = {"scatter_", "scatter", "index_fill_", "index_fill", "index_add_", "index_add"}
_SCORES = {"router_logits", "gating_output"}
# Whether the parser need be asked at all; asking it costs as much as the whole search.
_HINT = re.compile(
    rb"(?i)oea|opportunistic|batch_?aware|piggyback"
    rb"|\b(?:unique\w*|bincount|histc)\(|\b(?:any|sum|amax|max|count_nonzero)\([^()\n]*\b0\b"
    rb"|\b(?:scatter_?|index_(?:fill|add)_?)\(\s*(?:dim\s*=\s*)?0\b"
    rb"|\[[^\n=]*topk_ids[^\n=]*\]\s*=[^=]"
)
_SELF_EVIDENT = re.compile(r"(?:^|_)oea(?:_|\d|$)")
_METHOD = re.compile(r"(?:^|_)(?:opportunistic|batch_aware|piggyback\w*?)(?:_|$)")
_SUBJECT = re.compile(r"expert|rout|top_?k|select")
_OWN = "_surgeon"


def not_needed(source: bytes) -> NotNeeded | None:
    """Look for a sign that upstream does this itself.

    Args:
        source: topk.py, without surgeon's marks.

    Returns:
        None where there is none.
    """
    if not _HINT.search(source):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    select = functions.get(FUNCTION)
    if select is None:
        return None
    try:
        found = _named(tree, select) or _shaped(select, functions)
    except RecursionError:
        return None
    if found is None:
        return None
    reason, nodes = found
    lines = split_lines(split_bom(source)[1])
    numbers = sorted({node.lineno for node in nodes})
    return NotNeeded(reason, tuple(Line(n, lines[n - 1].decode("utf-8", "replace").rstrip("\r\n")) for n in numbers))


# ---------------------------------------------------------------- names


_Sign = tuple[str, list[ast.expr | ast.stmt | ast.arg]]


def _named(tree: ast.Module, select: ast.FunctionDef) -> _Sign | None:
    for name, node, where in (*_fields(tree), *_said(select)):
        if _tells(name):
            return f"sglang has batch-aware routing of its own: `{name}`, {where}.", [node]
    return None


def _tells(name: str) -> bool:
    if name.startswith(_OWN):
        return False
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return bool(_SELF_EVIDENT.search(snake) or (_METHOD.search(snake) and _SUBJECT.search(snake)))


def _fields(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == _CONFIG:
            for inner in node.body:
                if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    yield inner.target.id, inner, f"a field of `{_CONFIG}`"


def _said(select: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | ast.arg, str]]:
    arguments = select.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        yield argument.arg, argument, f"a parameter of `{FUNCTION}`"
    where = f"read in `{FUNCTION}`"
    for node in ast.walk(select):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                yield name, node, where
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                yield name, node, where


# ---------------------------------------------------------------- shape


def _shaped(select: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> _Sign | None:
    seen: set[str] = set()
    waiting = [select]
    while waiting:
        function = waiting.pop()
        if function.name in seen:
            continue
        seen.add(function.name)
        flow = _Flow()
        # Twice, so that what a loop carries round is seen.
        flow.walk(function.body)
        flow.walk(function.body)
        if flow.union is not None and flow.again is not None:
            where = f"in `{function.name}` the chosen experts are brought together over the rows and chosen from again"
            return f"sglang re-routes by the batch itself: {where}.", [flow.union, flow.again]
        called = {_called(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
        waiting.extend(functions[name] for name in sorted(called & functions.keys()))
    return None


class _Flow:
    """Which names of a function come from the chosen experts, from their union, and from a choice out of that.

    Attributes:
        union: where the chosen experts are brought together over the rows.
        again: where a choice out of that becomes the answer.
    """

    def __init__(self) -> None:
        self.union: ast.expr | None = None
        self.again: ast.stmt | None = None
        self._chosen = {IDS}
        self._scored = set(_SCORES)
        self._united: set[str] = set()
        self._rechosen: set[str] = set()

    def walk(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)
            for block in ("body", "orelse", "finalbody"):
                self.walk(getattr(statement, block, []))
            for handler in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                self.walk(handler.body)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                self._assign(statement, targets, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(statement, [target], value)
            case ast.AugAssign(target=target, value=value):
                self._assign(statement, [target], value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) as call) if (
                method.endswith("_")
            ):
                self._learn({name}, call)
            case ast.Return(value=ast.expr() as value) if self._mentions(value, self._rechosen):
                self.again = statement

    def _assign(self, statement: ast.stmt, targets: list[ast.expr], value: ast.expr) -> None:
        names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        for target in targets:
            # `used[topk_ids] = True`: one vector, marked at every chosen expert of every row.
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                names = {target.value.id}
                if self._mentions(target.slice, self._chosen) and not isinstance(target.slice, ast.Tuple):
                    self._unite(names, target)
        before = IDS in self._rechosen
        self._learn(names, value)
        if IDS in names and IDS in self._rechosen and not before:
            self.again = statement

    def _learn(self, names: set[str], value: ast.expr) -> None:
        calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
        united = next((call for call in calls if self._unites(call)), None)
        choices = [call for call in calls if _called(call) == "topk"]
        if united is not None:
            self._unite(names, united)
        else:
            self._spread(self._united, names, value)
            if not choices and IDS not in names:
                self._spread(self._scored, names, value)
        if any(self._mentions(call, self._united) and self._mentions(call, self._scored) for call in choices):
            self._rechosen |= names
        self._spread(self._rechosen, names, value)
        if choices:
            self._chosen |= names
        self._spread(self._chosen, names, value)

    def _spread(self, kind: set[str], names: set[str], value: ast.expr) -> None:
        if self._mentions(value, kind):
            kind |= names

    def _unite(self, names: set[str], where: ast.expr) -> None:
        self._united |= names
        self.union = self.union or where

    def _unites(self, call: ast.Call) -> bool:
        name = _called(call)
        if not self._mentions(call, self._chosen):
            return False
        if name in _DISTINCT:
            return True
        first = _dimension(call)
        return name in _OVER_ROWS | _INTO_ONE and first == 0

    @staticmethod
    def _mentions(node: ast.AST, names: set[str]) -> bool:
        return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _dimension(call: ast.Call) -> int | None:
    """`dim=0`, `axis=0`, `x.any(0)` or `torch.any(x, 0)`; None where it is not written as a number."""
    given = [keyword.value for keyword in call.keywords if keyword.arg in {"dim", "axis"}]
    candidates = given or call.args[:2]
    for value in candidates:
        if isinstance(value, ast.Constant) and type(value.value) is int:
            return value.value
    return None
