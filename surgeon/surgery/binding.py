"""Which local names are certainly bound when a function reaches one of its statements.

The answer errs on the side of "not certain": a name that is passed to the patch and is not bound would bring the
server down with an UnboundLocalError, while a name that is left out only makes the patch do less.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import libcst as cst

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Names = frozenset[str]
# None: no path reaches this point.
State = Names | None

_NOTHING: Names = frozenset()


def definitely_bound(function: cst.FunctionDef, index: int) -> Names:
    """Local names bound on every path that reaches a statement of the function's own body.

    Args:
        function: the function.
        index: which statement of its body; the names are those bound just before it.

    Returns:
        Parameters and local variables. Names declared ``global`` or ``nonlocal`` anywhere inside are left out, since
        other code can unbind them; so are names bound inside a ``with`` block, which may swallow the exception that
        kept them from being bound.
    """
    if not isinstance(function.body, cst.IndentedBlock):
        return _NOTHING
    reached = _Flow().block(function.body.body[:index], _parameters(function.params))
    shared = _Shared()
    function.body.visit(shared)
    return (reached or _NOTHING) - shared.names


def _parameters(parameters: cst.Parameters) -> Names:
    plain = [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params]
    starred = [p for p in (parameters.star_arg, parameters.star_kwarg) if isinstance(p, cst.Param)]
    return frozenset(p.name.value for p in (*plain, *starred))


class _Flow:
    """Walks statements in order and carries the set of bound names along."""

    def __init__(self) -> None:
        self._breaks: list[list[State]] = []

    def block(self, statements: Iterable[cst.CSTNode], state: State) -> State:
        for statement in statements:
            if state is None:
                return None
            state = self._statement(statement, state)
        return state

    def _suite(self, suite: cst.BaseSuite, state: State) -> State:
        return self.block(suite.body, state)

    def _statement(self, node: cst.CSTNode, state: Names) -> State:
        match node:
            case cst.BaseCompoundStatement():
                return self._compound(node, state)
            case cst.SimpleStatementLine():
                return self.block(node.body, state)
            case cst.Break():
                self._breaks[-1].append(state)
                return None
            case cst.Return() | cst.Raise() | cst.Continue():
                return None
            case _:
                return _small(node, state)

    def _compound(self, node: cst.BaseCompoundStatement, state: Names) -> State:
        after: State = state
        match node:
            case cst.If():
                after = self._if(node, state)
            case cst.While():
                after = self._while(node, state)
            case cst.For():
                after = self._for(node, state)
            case cst.Try() | cst.TryStar():
                after = self._try(node, state)
            case cst.With():
                after = self._with(node, state)
            case cst.Match():
                after = self._match(node, state | _walrus(node.subject))
            case cst.FunctionDef() | cst.ClassDef():
                after = state | {node.name.value}
        return after

    def _if(self, node: cst.If, state: Names) -> State:
        state |= _walrus(node.test)
        taken = self._suite(node.body, state)
        match node.orelse:
            case cst.If() as other:
                return _join(taken, self._if(other, state))
            case cst.Else() as other:
                return _join(taken, self._suite(other.body, state))
            case _:
                return _join(taken, state)

    def _while(self, node: cst.While, state: Names) -> State:
        lost = _unbound([node])
        state = (state - lost) | _walrus(node.test)
        forever = isinstance(node.test, cst.Name) and node.test.value == "True"
        return self._loop(node, state, lost, None if forever else state)

    def _for(self, node: cst.For, state: Names) -> State:
        lost = _unbound([node])
        state = (state | _walrus(node.iter)) - lost
        return self._loop(node, state | _targets(node.target), lost, state)

    def _loop(self, node: cst.While | cst.For, entry: Names, lost: Names, done: State) -> State:
        self._breaks.append([])
        self._suite(node.body, entry)
        left = self._breaks.pop()
        if node.orelse is not None:
            done = self._suite(node.orelse.body, done)
        return _join(done, *(None if state is None else state - lost for state in left))

    def _try(self, node: cst.Try | cst.TryStar, state: Names) -> State:
        ended = self._suite(node.body, state)
        if node.orelse is not None:
            ended = self._suite(node.orelse.body, ended)
        interrupted = state - _unbound([node.body])
        ends = [ended]
        for handler in node.handlers:
            caught = _targets(handler.name.name) if handler.name is not None else _NOTHING
            end = self._suite(handler.body, interrupted | caught)
            # Python deletes the name of `except ... as name` when the handler ends.
            ends.append(None if end is None else end - caught)
        ended = _join(*ends)
        if node.finalbody is None:
            return ended
        # What runs before `finally` may have been cut short anywhere, in a handler too.
        certain = interrupted - _unbound([*node.handlers, *([node.orelse] if node.orelse else [])])
        final = self._suite(node.finalbody.body, certain)
        if final is None or ended is None:
            return None
        return final | (ended - _unbound([node.finalbody]))

    def _with(self, node: cst.With, state: Names) -> State:
        # A context manager may swallow the exception that ended the block early, whatever the block binds or however
        # it leaves, so only what was bound before it counts. Its body is still walked, for the breaks in it.
        self._suite(node.body, state)
        return (state | _walrus(node.items[0].item)) - _unbound([node])

    def _match(self, node: cst.Match, state: Names) -> State:
        # What a pattern captures is left out.
        return _join(state, *(self._suite(case.body, state) for case in node.cases))


def _small(node: cst.CSTNode, state: Names) -> State:
    # An assertion binds nothing that is certain: under -O it is not evaluated.
    bound = _NOTHING
    match node:
        case cst.Assign():
            bound = _walrus(node.value).union(*(_targets(t.target) for t in node.targets))
        case cst.AnnAssign(value=cst.BaseExpression() as value):
            bound = _walrus(value) | _targets(node.target)
        case cst.AugAssign():
            bound = _walrus(node.value) | _targets(node.target)
        case cst.Expr():
            bound = _walrus(node.value)
        case cst.Import() | cst.ImportFrom():
            bound = _imported(node)
        case cst.TypeAlias():
            bound = _targets(node.name)
        case cst.Del():
            return state - _targets(node.target)
    return state | bound


def _imported(node: cst.Import | cst.ImportFrom) -> Names:
    if isinstance(node.names, cst.ImportStar):
        return _NOTHING
    return frozenset().union(*(_alias(alias) for alias in node.names))


def _alias(alias: cst.ImportAlias) -> Names:
    if alias.asname is not None:
        return _targets(alias.asname.name)
    name: cst.BaseExpression = alias.name
    while isinstance(name, cst.Attribute):
        name = name.value
    return _targets(name)


def _targets(node: cst.CSTNode) -> Names:
    match node:
        case cst.Name():
            return frozenset({node.value})
        case cst.Tuple() | cst.List():
            return frozenset().union(*(_targets(element.value) for element in node.elements))
        case cst.StarredElement():
            return _targets(node.value)
        case _:
            return _NOTHING


def _join(*states: State) -> State:
    reached = [state for state in states if state is not None]
    return functools.reduce(frozenset.intersection, reached) if reached else None


def _walrus(node: cst.CSTNode) -> Names:
    """Names that `:=` binds whenever the expression is evaluated to its end."""
    visitor = _Walrus()
    node.visit(visitor)
    return frozenset(visitor.names)


def _unbound(nodes: Sequence[cst.CSTNode]) -> Names:
    """Names that something inside may unbind: `del name`, and the end of `except ... as name`."""
    visitor = _Unbound()
    for node in nodes:
        node.visit(visitor)
    return frozenset(visitor.names)


class _Names(cst.CSTVisitor):
    """Collects names; LibCST's own visitor methods are not used, since one `match` says it all."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()


class _Walrus(_Names):
    def on_visit(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.NamedExpr():
                self.names |= _targets(node.target)
            case cst.BooleanOperation():
                node.left.visit(self)
                return False
            case cst.IfExp():
                node.test.visit(self)
                return False
            case cst.Comparison():
                node.left.visit(self)
                node.comparisons[0].comparator.visit(self)
                return False
            case cst.Lambda() | cst.BaseComp():
                return False
        return True


class _Unbound(_Names):
    def on_visit(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.Del():
                self.names |= _targets(node.target)
            case cst.ExceptHandler(name=cst.AsName(name=name)) | cst.ExceptStarHandler(name=cst.AsName(name=name)):
                self.names |= _targets(name)
        return not isinstance(node, cst.BaseExpression)


class _Shared(_Names):
    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Global | cst.Nonlocal):
            self.names |= {item.name.value for item in node.names}
        return not isinstance(node, cst.BaseExpression)
