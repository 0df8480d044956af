"""Search a file, by structure, for the site where a place's patch goes in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libcst as cst

from surgeon.surgery.binding import definitely_bound
from surgeon.surgery.definitions import Definition, find_definition
from surgeon.surgery.outcomes import Ambiguous, Found, Line, NotFound, Unparsable
from surgeon.surgery.parse import Parsed, Unmappable, parse
from surgeon.surgery.recipes import Blocked, Fits, Recipe, judge, recipes_of
from surgeon.surgery.text import split_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.surgery.places import Place


def search(source: bytes, place: Place) -> Found | NotFound | Ambiguous | Unparsable:
    """Find the site in a file without marks, by LibCST's tree.

    Args:
        source: the file as it is on the node.
        place: which place to look for.

    Returns:
        What is there; nothing that a file can hold makes it raise.
    """
    parsed = parse(source)
    if isinstance(parsed, Unparsable):
        return parsed
    try:
        return _locate(parsed, place)
    except Unmappable as error:
        return Unparsable(str(error), None, "")
    except RecursionError:
        return Unparsable("Its code is nested too deeply to be looked through.", None, "")


def _locate(parsed: Parsed, place: Place) -> Found | NotFound | Ambiguous:
    definition = find_definition(parsed, place)
    if not isinstance(definition, Definition):
        return definition
    silent: list[str] = []
    recipes = recipes_of(place)
    for recipe in recipes:
        answer = judge(recipe, definition.function)
        if isinstance(answer, Fits):
            return _found(parsed, definition, recipe, answer)
        if isinstance(answer, Blocked):
            return _blocked(parsed, definition, recipe, answer)
        silent.append(answer.reason)
    return NotFound(
        f"No recipe fits `{place.label}`: {'; '.join(silent)}.",
        tuple(f"{recipe.anchor} ({recipe.releases})" for recipe in recipes),
        _nearest(parsed, definition, place),
    )


def _found(parsed: Parsed, definition: Definition, recipe: Recipe, fits: Fits) -> Found | NotFound:
    function, body, place = definition.function, definition.body, recipe.place
    anchor = _above(parsed, definition, fits) + len(_leading(fits.statement))
    escape = _escape(body.body[: fits.index])
    if escape is not None:
        line = _line(parsed, definition, escape)
        return NotFound(
            f"`return` in line {line.number} leaves `{place.label}` before the site, so some passes would go by it.",
            (recipe.anchor, "no `return` above it"),
            (line, Line(anchor + 1, parsed.text(anchor + 1))),
        )
    bound = definitely_bound(function, fits.index)
    missing = [name for name in place.needs if name not in bound]
    if missing:
        return NotFound(
            f"{' and '.join(f'`{name}`' for name in missing)} may not be bound on every path to the site.",
            (recipe.anchor, f"{', '.join(f'`{name}`' for name in place.needs)} bound above it"),
            (Line(anchor + 1, parsed.text(anchor + 1)),),
        )
    site = anchor - _own_comments(_leading(fits.statement))
    outer = definition.outer.leading_lines
    import_site = definition.owner_top + len(outer) - _own_comments(outer)
    default = parsed.module.default_indent
    step = default if body.indent is None else body.indent
    owner = definition.owner
    outside = "" if owner is None else _indent(owner.body, default)
    return Found(
        recipe=recipe.name,
        releases=recipe.releases,
        function=place.label,
        line=anchor + 1,
        text=parsed.text(anchor + 1),
        site=site + 1,
        import_site=import_site + 1,
        indent=outside + step,
        step=step,
        newline=_newline(parsed, site),
        import_newline=_newline(parsed, import_site),
        bound=bound,
    )


def _blocked(parsed: Parsed, definition: Definition, recipe: Recipe, answer: Blocked) -> NotFound | Ambiguous:
    places = tuple(_line(parsed, definition, statement) for statement in answer.statements)
    reason = f"In `{recipe.place.label}` {answer.reason}."
    if len(places) > 1:
        return Ambiguous(reason, places)
    return NotFound(reason, (recipe.anchor,), places)


def _above(parsed: Parsed, definition: Definition, fits: Fits) -> int:
    """How many lines stand above a statement of the function's own body, its leading comments not counted."""
    function, top = definition.function, definition.top
    if definition.owner is None:
        return parsed.start_in(function, top, fits.statement)
    # What stands above it in the method is written out, indented as the class indents it, and held against the file.
    ends_here = cst.SimpleStatementLine([cst.Pass()])
    body = definition.body.with_changes(body=[*definition.body.body[: fits.index], ends_here], footer=())
    block = cst.IndentedBlock([function.with_changes(body=body)], indent=_own_indent(definition.owner.body))
    code = parsed.module.code_for_node(cst.If(cst.Name("x"), block))
    head = b"".join(split_lines(code.encode(parsed.encoding))[1:-1])
    count = len(split_lines(head))
    # LibCST drops form feeds in indentation; they end no line, so the count holds without them.
    if head.replace(b"\f", b"") != b"".join(parsed.lines[top : top + count]).replace(b"\f", b""):
        raise Unmappable(f"LibCST does not give back the lines above `{function.name.value}`'s site as they are")
    return top + count


def _own_indent(block: cst.BaseSuite) -> str | None:
    return block.indent if isinstance(block, cst.IndentedBlock) else None


def _indent(block: cst.BaseSuite, default: str) -> str:
    own = _own_indent(block)
    return default if own is None else own


def _leading(statement: cst.BaseStatement) -> Sequence[cst.EmptyLine]:
    leading: Sequence[cst.EmptyLine] = getattr(statement, "leading_lines", ())
    return leading


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


def _line(parsed: Parsed, definition: Definition, statement: cst.BaseStatement) -> Line:
    number = parsed.start_in(definition.outer, definition.owner_top, statement) + len(_leading(statement)) + 1
    return Line(number, parsed.text(number))


def _nearest(parsed: Parsed, definition: Definition, place: Place) -> tuple[Line, ...]:
    """What a new recipe would look at: where the function last hands on what the call would replace, or its head."""
    first = definition.top + len(definition.function.leading_lines) + 1
    if not place.assigns:
        return (Line(first, parsed.text(first)),)
    count = len(parsed.module.code_for_node(definition.function.with_changes(leading_lines=())).splitlines())
    lines = (Line(number, parsed.text(number)) for number in range(first, min(first + count, len(parsed.lines) + 1)))
    return tuple(line for line in lines if re.search(rf"\b{place.assigns[-1]}\b", line.text))[-3:]
