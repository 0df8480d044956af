"""Search topk.py, by structure, for the place where a patch of the expert selection goes in."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from surgeon.surgery.binding import definitely_bound
from surgeon.surgery.outcomes import FUNCTION, IDS, LOGITS, WEIGHTS, Ambiguous, Found, Line, NotFound, Unparsable
from surgeon.surgery.parse import Parsed, Unmappable, parse
from surgeon.surgery.recipes import RECIPES, Blocked, Fits, Recipe, judge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def search(source: bytes) -> Found | NotFound | Ambiguous | Unparsable:
    """Find the site in a file without marks, by LibCST's tree.

    Args:
        source: the file as it is on the node.

    Returns:
        What is there; nothing that a file can hold makes it raise.
    """
    parsed = parse(source)
    if isinstance(parsed, Unparsable):
        return parsed
    try:
        return _locate(parsed)
    except Unmappable as error:
        return Unparsable(str(error), None, "")
    except RecursionError:
        return Unparsable("Its code is nested too deeply to be looked through.", None, "")


def _locate(parsed: Parsed) -> Found | NotFound | Ambiguous:
    definition = _definition(parsed)
    if not isinstance(definition, _Definition):
        return definition
    silent: list[str] = []
    for recipe in RECIPES:
        answer = judge(recipe, definition.function)
        if isinstance(answer, Fits):
            return _found(parsed, definition, recipe, answer)
        if isinstance(answer, Blocked):
            return _blocked(parsed, definition, recipe, answer)
        silent.append(answer.reason)
    return NotFound(
        f"`{FUNCTION}` has none of the statements that a recipe looks for: {'; '.join(silent)}.",
        _anchors(),
        _nearest_calls(parsed, definition),
    )


@dataclass(frozen=True, eq=False)
class _Definition:
    function: cst.FunctionDef
    body: cst.IndentedBlock
    # Lines above the function, its leading comments not counted.
    top: int


def _definition(parsed: Parsed) -> _Definition | NotFound | Ambiguous:
    bindings = list(_bindings(parsed.module.body, FUNCTION))
    if not bindings:
        return NotFound(
            f"The file defines no function `{FUNCTION}`.", (f"def {FUNCTION}(...)",), _nearest_definitions(parsed)
        )
    lines = _lines(
        parsed, rf"\s*(?:async\s+)?def\s+{FUNCTION}\b|[^#]*\b{FUNCTION}\s*=[^=]|.*\bimport\b.*\b{FUNCTION}\b"
    )
    if len(bindings) > 1:
        return Ambiguous(f"`{FUNCTION}` is bound {len(bindings)} times at module level; one is expected.", lines)
    node = bindings[0]
    index = next((i for i, statement in enumerate(parsed.module.body) if statement is node), None)
    if not isinstance(node, cst.FunctionDef):
        reason = f"`{FUNCTION}` is not defined in this file but bound to something from elsewhere."
    elif index is None:
        reason = f"`{FUNCTION}` is defined inside another block; a function at module level is expected."
    elif node.decorators:
        reason = f"`{FUNCTION}` is decorated; what its decorator makes of new statements is not known."
    elif node.asynchronous is not None:
        reason = f"`{FUNCTION}` is a coroutine; a plain function is expected."
    elif not isinstance(node.body, cst.IndentedBlock):
        reason = f"`{FUNCTION}` stands on one line; a body in lines of its own is expected."
    else:
        return _Definition(node, node.body, parsed.start(index))
    return NotFound(reason, (f"def {FUNCTION}(...)",), lines)


def _bindings(statements: Sequence[cst.CSTNode], name: str) -> Iterator[cst.CSTNode]:
    """Statements that bind a name at module level, conditional ones too; functions and classes are not entered."""
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
    return {target.value for target in targets if isinstance(target, cst.Name)}


def _found(parsed: Parsed, definition: _Definition, recipe: Recipe, fits: Fits) -> Found | NotFound:
    function, body = definition.function, definition.body
    above = parsed.start_in(function, definition.top, fits.statement)
    anchor = above + len(fits.statement.leading_lines)
    escape = _escape(body.body[: fits.index])
    if escape is not None:
        line = _line(parsed, definition, escape)
        return NotFound(
            f"`return` in line {line.number} leaves `{FUNCTION}` before the site, so some selections would pass by it.",
            (recipe.anchor, "no `return` above it"),
            (line, Line(anchor + 1, parsed.text(anchor + 1))),
        )
    bound = definitely_bound(function, fits.index)
    missing = [name for name in (WEIGHTS, IDS, LOGITS) if name not in bound]
    if missing:
        return NotFound(
            f"{' and '.join(f'`{name}`' for name in missing)} may not be bound on every path to the site.",
            (recipe.anchor, f"`{WEIGHTS}`, `{IDS}` and `{LOGITS}` bound above it"),
            (Line(anchor + 1, parsed.text(anchor + 1)),),
        )
    defined = definition.top + len(function.leading_lines)
    site = anchor - _own_comments(fits.statement.leading_lines)
    import_site = defined - _own_comments(function.leading_lines)
    step = parsed.module.default_indent if body.indent is None else body.indent
    return Found(
        recipe=recipe.name,
        releases=recipe.releases,
        function=FUNCTION,
        line=anchor + 1,
        text=parsed.text(anchor + 1),
        site=site + 1,
        import_site=import_site + 1,
        indent=step,
        step=step,
        newline=_newline(parsed, site),
        import_newline=_newline(parsed, import_site),
        bound=bound,
    )


def _blocked(parsed: Parsed, definition: _Definition, recipe: Recipe, answer: Blocked) -> NotFound | Ambiguous:
    places = tuple(_line(parsed, definition, statement) for statement in answer.statements)
    reason = f"In `{FUNCTION}` {answer.reason}."
    if len(places) > 1:
        return Ambiguous(reason, places)
    return NotFound(reason, (recipe.anchor,), places)


def _escape(statements: Sequence[cst.CSTNode]) -> cst.BaseStatement | None:
    """The first statement among these, at any depth, that returns from the function itself."""
    for statement in statements:
        match statement:
            case cst.FunctionDef() | cst.ClassDef() | cst.BaseExpression():
                continue
            case cst.SimpleStatementLine():
                if any(isinstance(small, cst.Return) for small in statement.body):
                    return statement
            case cst.CSTNode():
                inner = _escape(statement.children)
                if inner is not None:
                    return inner
    return None


def _own_comments(leading: Sequence[cst.EmptyLine]) -> int:
    """How many comment lines stand right above a statement, no blank line between."""
    count = 0
    for line in reversed(leading):
        if line.comment is None:
            break
        count += 1
    return count


def _newline(parsed: Parsed, index: int) -> str:
    """The line end of the nearest line that has one, from this line upwards."""
    for line in (parsed.lines[index], *reversed(parsed.lines[:index])):
        end = line[len(line.rstrip(b"\r\n")) :]
        if end:
            return end.decode("ascii")
    return parsed.module.default_newline


def _line(parsed: Parsed, definition: _Definition, statement: cst.BaseStatement) -> Line:
    above = parsed.start_in(definition.function, definition.top, statement)
    number = above + len(getattr(statement, "leading_lines", ())) + 1
    return Line(number, parsed.text(number))


def _lines(parsed: Parsed, pattern: str) -> tuple[Line, ...]:
    matcher = re.compile(pattern)
    numbered = (Line(number, parsed.text(number)) for number in range(1, len(parsed.lines) + 1))
    return tuple(line for line in numbered if matcher.match(line.text))


def _anchors() -> tuple[str, ...]:
    return tuple(f"{recipe.anchor} ({recipe.releases})" for recipe in RECIPES)


def _nearest_definitions(parsed: Parsed) -> tuple[Line, ...]:
    lines = _lines(parsed, r"\s*(?:async\s+)?def\s+\w+")
    names = {line.text.split("def", 1)[1].split("(")[0].strip(): line for line in lines}
    return tuple(names[name] for name in difflib.get_close_matches(FUNCTION, names, n=3, cutoff=0.5))


def _nearest_calls(parsed: Parsed, definition: _Definition) -> tuple[Line, ...]:
    """Where the function last hands on the selected experts: the place a new recipe would look at."""
    first = definition.top + len(definition.function.leading_lines) + 1
    count = len(parsed.module.code_for_node(definition.function.with_changes(leading_lines=())).splitlines())
    lines = (Line(number, parsed.text(number)) for number in range(first, min(first + count, len(parsed.lines) + 1)))
    return tuple(line for line in lines if re.search(rf"\b{IDS}\b", line.text))[-3:]
