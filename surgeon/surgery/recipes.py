"""Where a patch can go in: an ordered registry of recipes, one per place and family of releases.

A recipe knows one anchor, a statement in the place's function; the graft goes in right before it. Recipes of a place
are asked in order; one whose trace is in the function, though not as it should be, stops the search, because a later
anchor would then see experts that something has already changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from surgeon.surgery.outcomes import IDS, WEIGHTS
from surgeon.surgery.places import EXPERTS, FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable

    from surgeon.surgery.places import Place


@dataclass(frozen=True)
class BeforeCall:
    """Right before the statement that makes a certain call.

    Attributes:
        callee: the function or method whose call is the trace of this anchor.
        match: whether a small statement is the anchor.
    """

    callee: str
    match: Callable[[cst.BaseSmallStatement], bool]


@dataclass(frozen=True)
class AtEntry:
    """Before the first statement of the body, after a docstring: on every path, whatever the body does."""


@dataclass(frozen=True)
class Recipe:
    """One way to find the site.

    Attributes:
        name: short name, shown to people and kept in the ledger.
        place: whose recipe it is.
        releases: the sglang releases it was seen to fit.
        anchor: the statement it looks for, in words.
        where: how it is found.
        why: why the site is right before it.
    """

    name: str
    place: Place
    releases: str
    anchor: str
    where: BeforeCall | AtEntry
    why: str


@dataclass(frozen=True, eq=False)
class Fits:
    """The anchor is there, once, as a statement of the function's own body.

    Attributes:
        index: which statement of the function's body it is.
        statement: that statement.
    """

    index: int
    statement: cst.BaseStatement


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
        function: the function of the recipe's place.
    """
    match recipe.where:
        case BeforeCall() as call:
            return _judge_call(recipe, call, function)
        case AtEntry():
            return _judge_entry(recipe, function)


def _judge_call(recipe: Recipe, call: BeforeCall, function: cst.FunctionDef) -> Fits | Silent | Blocked:
    traces = _Traces(call.callee)
    function.body.visit(traces)
    if not traces.statements:
        return Silent(f"`{call.callee}` is not called in it")
    places = tuple(traces.statements)
    if len(places) > 1:
        return Blocked(f"`{call.callee}` is called {len(places)} times", places)
    for index, statement in enumerate(function.body.body):
        if statement is not places[0] or not isinstance(statement, cst.SimpleStatementLine):
            continue
        if len(statement.body) > 1:
            return Blocked(f"the call of `{call.callee}` shares its line with other statements", places)
        if not call.match(statement.body[0]):
            return Blocked(f"`{call.callee}` is called, but not as {recipe.anchor}", places)
        changed = next((one for one in function.body.body[:index] if _changes_ids(one)), None)
        if isinstance(changed, cst.SimpleStatementLine):
            return Blocked(f"`{IDS}` is made anew out of itself before `{call.callee}` is called", (changed,))
        return Fits(index, statement)
    return Blocked(
        f"`{call.callee}` is called inside a nested block, so some selections would pass by the site", places
    )


def _judge_entry(recipe: Recipe, function: cst.FunctionDef) -> Fits | Silent:
    needs = recipe.place.needs
    params = function.params
    first = tuple(parameter.name.value for parameter in (*params.posonly_params, *params.params))[: len(needs)]
    if first != needs:
        return Silent(f"its first parameters are ({', '.join(first)}), not ({', '.join(needs)})")
    for index, statement in enumerate(function.body.body):
        if isinstance(statement, cst.BaseStatement) and not (index == 0 and _is_docstring(statement)):
            return Fits(index, statement)
    return Silent("it has nothing but a docstring in it")


def _is_docstring(statement: cst.BaseStatement) -> bool:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString())]):
            return True
        case _:
            return False


def _changes_ids(statement: cst.CSTNode) -> bool:
    """Whether a statement makes the ids anew out of themselves on every path, as a remapping to physical experts does.

    Under a condition it may: sglang's simulated routing does, and is told from real routing when the patch runs.
    """
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    return any(isinstance(small, cst.Assign) and _assigns_from(small, IDS) for small in statement.body)


def _assigns_from(assign: cst.Assign, name: str) -> bool:
    targets = _Names(name)
    for target in assign.targets:
        target.target.visit(targets)
    read = _Names(name)
    assign.value.visit(read)
    return targets.found and read.found


class _Names(cst.CSTVisitor):
    """Whether a name occurs, keywords of calls left out."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.found = False
        self._name = name

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802 - LibCST names it
        self.found = self.found or node.value == self._name

    def visit_Arg(self, node: cst.Arg) -> bool:  # noqa: N802 - LibCST names it
        node.value.visit(self)
        return False


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


def _records_tokens(statement: cst.BaseSmallStatement) -> bool:
    match statement:
        case cst.Expr(value=cst.Call(func=cst.Attribute(), args=[cst.Arg(keyword=None, star="", value=value)])):
            return _is_name(value, IDS)
        case _:
            return False


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="before-post-process",
        place=EXPERTS,
        releases="0.5.10 to 0.5.23",
        anchor=(
            "an assignment of `topk_ids, topk_weights, ...` from "
            "`_post_process_topk_ids(topk_ids=topk_ids, topk_weights=topk_weights, ...)`"
        ),
        where=BeforeCall("_post_process_topk_ids", _assigns_post_processed),
        why="ids are still logical there; afterwards they are remapped to physical experts and masked",
    ),
    Recipe(
        name="before-recorder",
        place=EXPERTS,
        releases="0.4.6.post5 to 0.5.9",
        anchor="a statement `....on_select_experts(topk_ids=topk_ids)`",
        where=BeforeCall("on_select_experts", _records_selected),
        why="the recorder then counts what the experts really get",
    ),
    Recipe(
        name="before-old-recorder",
        place=EXPERTS,
        releases="0.4.6 to 0.4.6.post4",
        anchor="a statement `....record_new_token(topk_ids)`",
        where=BeforeCall("record_new_token", _records_tokens),
        why="the recorder then counts what the experts really get",
    ),
    Recipe(
        name="at-entry",
        place=FORWARD,
        releases="0.4.6 to 0.5.23",
        anchor="the first statement of `ModelRunner.forward(self, forward_batch, ...)`",
        where=AtEntry(),
        why="every pass begins there, whether a CUDA graph is replayed for it or not",
    ),
)


def recipes_of(place: Place) -> tuple[Recipe, ...]:
    """The recipes of one place, in the order in which they are asked.

    Args:
        place: the place.
    """
    return tuple(recipe for recipe in RECIPES if recipe.place == place)
