"""Where a patch of the expert selection can go in: an ordered registry of recipes, one per family of releases.

A recipe knows one anchor, a statement of `select_experts` that takes the selected experts further. The graft goes in
right before it. Recipes are asked in order; one whose trace is in the function, though not as it should be, stops the
search, because a later anchor would then see experts that something has already changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from surgeon.surgery.outcomes import IDS, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Recipe:
    """One way to find the site.

    Attributes:
        name: short name, shown to people and kept in the ledger.
        releases: the sglang releases it was seen to fit.
        anchor: the statement it looks for, in words.
        callee: the function or method whose call is the trace of this anchor.
        match: whether a small statement is the anchor.
        why: why the site is right before it.
    """

    name: str
    releases: str
    anchor: str
    callee: str
    match: Callable[[cst.BaseSmallStatement], bool]
    why: str


@dataclass(frozen=True, eq=False)
class Fits:
    """The anchor is there, once, as a statement of the function's own body.

    Attributes:
        index: which statement of the function's body it is.
        statement: the line it stands on.
    """

    index: int
    statement: cst.SimpleStatementLine


@dataclass(frozen=True)
class Silent:
    """Nothing of this recipe is in the function; ask the next one.

    Attributes:
        reason: in words.
    """

    reason: str


@dataclass(frozen=True, eq=False)
class Blocked:
    """The recipe's trace is there, but not as an anchor that could be used; no later recipe may be asked.

    Attributes:
        reason: in words.
        statements: where the trace is.
    """

    reason: str
    statements: tuple[cst.BaseStatement, ...]


def judge(recipe: Recipe, function: cst.FunctionDef) -> Fits | Silent | Blocked:
    """Ask one recipe about a function.

    Args:
        recipe: the recipe.
        function: `select_experts`.
    """
    traces = _Traces(recipe.callee)
    function.body.visit(traces)
    if not traces.statements:
        return Silent(f"`{recipe.callee}` is not called in it")
    places = tuple(traces.statements)
    if len(places) > 1:
        return Blocked(f"`{recipe.callee}` is called {len(places)} times", places)
    for index, statement in enumerate(function.body.body):
        if statement is not places[0] or not isinstance(statement, cst.SimpleStatementLine):
            continue
        if len(statement.body) > 1:
            return Blocked(f"the call of `{recipe.callee}` shares its line with other statements", places)
        if not recipe.match(statement.body[0]):
            return Blocked(f"`{recipe.callee}` is called, but not as {recipe.anchor}", places)
        return Fits(index, statement)
    return Blocked(
        f"`{recipe.callee}` is called inside a nested block, so some selections would pass by the site", places
    )


class _Traces(cst.CSTVisitor):
    """Collects, for each call of a name, the innermost statement that holds it."""

    def __init__(self, callee: str) -> None:
        super().__init__()
        self.statements: list[cst.BaseStatement] = []
        self._callee = callee
        self._stack: list[cst.BaseStatement] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.BaseStatement):
            self._stack.append(node)
        elif isinstance(node, cst.Call) and called_name(node) == self._callee:
            self.statements.append(self._stack[-1])
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.BaseStatement):
            self._stack.pop()


def called_name(call: cst.Call) -> str | None:
    """The last part of the name that is called: `f` for `f()`, `a.f()` and `a().f()`.

    Args:
        call: the call.
    """
    match call.func:
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return str(name)
        case _:
            return None


def _keywords(call: cst.Call) -> dict[str, cst.BaseExpression]:
    return {argument.keyword.value: argument.value for argument in call.args if argument.keyword is not None}


def _is_name(node: cst.CSTNode | None, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name


def _assigns_post_processed(statement: cst.BaseSmallStatement) -> bool:
    match statement:
        case cst.Assign(
            targets=[cst.AssignTarget(target=cst.Tuple(elements=elements))],
            value=cst.Call(func=cst.Name(value="_post_process_topk_ids")) as call,
        ):
            assigned = {e.value.value for e in elements if isinstance(e.value, cst.Name)}
            passed = _keywords(call)
            return {IDS, WEIGHTS} <= assigned and all(_is_name(passed.get(n), n) for n in (IDS, WEIGHTS))
        case _:
            return False


def _records_selected(statement: cst.BaseSmallStatement) -> bool:
    match statement:
        case cst.Expr(value=cst.Call(func=cst.Attribute()) as call):
            return _is_name(_keywords(call).get(IDS), IDS)
        case _:
            return False


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="before-post-process",
        releases="0.5.10 to 0.5.23",
        anchor=(
            "an assignment of `topk_ids, topk_weights, ...` from "
            "`_post_process_topk_ids(topk_ids=topk_ids, topk_weights=topk_weights, ...)`"
        ),
        callee="_post_process_topk_ids",
        match=_assigns_post_processed,
        why="ids are still logical there; afterwards they are remapped to physical experts and masked",
    ),
    Recipe(
        name="before-recorder",
        releases="0.4.9 to 0.5.9",
        anchor="a statement `....on_select_experts(topk_ids=topk_ids)`",
        callee="on_select_experts",
        match=_records_selected,
        why="the recorder then counts what the experts really get",
    ),
)
