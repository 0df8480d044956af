"""Cut a call into one of sglang's files and take it out again, byte for byte."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from surgeon.errors import DoesNotFitError, ForeignEditError
from surgeon.surgery import markers
from surgeon.surgery.locate import locate
from surgeon.surgery.outcomes import AlreadyGrafted, Ambiguous, Found, Line, NotFound, NotNeeded, Unparsable
from surgeon.surgery.text import split_bom, split_lines

if TYPE_CHECKING:
    from surgeon.surgery.markers import GraftSpec

_KEEP = "The file was left as it is."


@dataclass(frozen=True)
class Grafted:
    """A graft, made and proved.

    Attributes:
        source: the file as it was.
        result: the file with the graft.
        spec: what was grafted; `wants` holds the names that are passed, in order.
        site: where.
        inserted: the new lines in `result`, counted from 1: the import, then the call.
    """

    source: bytes
    result: bytes
    spec: GraftSpec
    site: Found
    inserted: tuple[range, ...]


def graft(source: bytes, spec: GraftSpec) -> Grafted:
    """Cut the call in at the site that `locate` finds.

    Whole lines are inserted and nothing else is touched. Before the result is returned, it is proved: without the
    inserted lines it is the source; it compiles; its syntax tree has the two new statements where they belong; and
    `ungraft` gives the source back.

    Args:
        source: the file as it is on the node.
        spec: what to graft; of `wants`, only names bound at the site are passed.

    Raises:
        DoesNotFitError: there is no site; with code "already-grafted" if surgeon's own graft is there.
        ForeignEditError: surgeon's marks are damaged, or the runtime's name is in use without marks.
    """
    site = locate(source, spec.place)
    if not isinstance(site, Found):
        _refuse(site)
    _refuse_stray_name(source, spec.module)
    passed = replace(spec, wants=tuple(name for name in spec.wants if name in site.bound))
    bom, rest = split_bom(source)
    lines = split_lines(rest)
    above = split_lines(markers.import_block(passed, site.import_newline).encode("ascii"))
    call = split_lines(markers.call_block(passed, site.indent, site.step, site.newline).encode("ascii"))
    top, place = site.import_site - 1, site.site - 1
    result = bom + b"".join((*lines[:top], *above, *lines[top:place], *call, *lines[place:]))
    inserted = (
        range(top + 1, top + 1 + len(above)),
        range(place + 1 + len(above), place + 1 + len(above) + len(call)),
    )
    grafted = Grafted(source, result, passed, site, inserted)
    _prove(grafted)
    return grafted


def ungraft(source: bytes) -> bytes:
    """Take a graft out.

    Args:
        source: a file that `graft` made.

    Returns:
        The bytes that `graft` was given.

    Raises:
        DoesNotFitError: nothing in the file says surgeon was there.
        ForeignEditError: the marked lines are not what surgeon wrote, or more of it is elsewhere in the file.
    """
    marked = markers.scan(source)
    if marked is None:
        raise DoesNotFitError(
            "A file with surgeon's marks is expected; this one has none.",
            advice="There is nothing to take out.",
            code="not-grafted",
        )
    if isinstance(marked, markers.Broken):
        _refuse_broken(marked.reason, marked.line)
    bom, rest = split_bom(source)
    lines = split_lines(rest)
    kept = (*lines[: marked.imports.first], *lines[marked.imports.last : marked.call.first], *lines[marked.call.last :])
    original = bom + b"".join(kept)
    _refuse_stray_name(original, marked.spec.module)
    return original


def _prove(grafted: Grafted) -> None:
    bom, rest = split_bom(grafted.result)
    inserted = {number for block in grafted.inserted for number in block}
    kept = (line for number, line in enumerate(split_lines(rest), 1) if number not in inserted)
    _insist(bom + b"".join(kept) == grafted.source, "the lines outside the graft are not the source's")
    _insist(ungraft(grafted.result) == grafted.source, "taking the graft out does not give the source back")
    answer = locate(grafted.result, grafted.spec.place)
    _insist(isinstance(answer, AlreadyGrafted) and not answer.problem, "the graft does not find itself again")
    try:
        with warnings.catch_warnings():
            # Warnings about the file's own code are its authors' business.
            warnings.simplefilter("ignore")
            tree = ast.parse(grafted.result)
            compile(tree, grafted.spec.place.file, "exec", dont_inherit=True)
    except SyntaxError:
        _prove_by_libcst(grafted)
    else:
        _prove_place(grafted, tree)


def _prove_place(grafted: Grafted, tree: ast.Module) -> None:
    imports, call = grafted.inserted
    place = grafted.spec.place
    scope: list[ast.stmt] = tree.body
    if place.owner is not None:
        owner = next((n for n in scope if isinstance(n, ast.ClassDef) and n.name == place.owner), None)
        scope = owner.body if owner is not None else []
    function = next((n for n in scope if isinstance(n, ast.FunctionDef) and n.name == place.function), None)
    _insist(function is not None, "the function is gone")
    above = [n for n in tree.body if n.lineno in imports]
    inside = [n for n in function.body if n.lineno in call] if function is not None else []
    after = [first for n in function.body if (first := _first_line(n)) >= call.stop] if function is not None else []
    _insist(len(above) == 1 and isinstance(above[0], ast.ImportFrom), "the import is not at module level")
    _insist(len(inside) == 1 and isinstance(inside[0], ast.If), "the call is not a statement of the function")
    shift = len(imports) + len(call)
    _insist(after[:1] == [grafted.site.line + shift], "the call is not right before its anchor")


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _prove_by_libcst(grafted: Grafted) -> None:
    """For a file whose syntax is newer than the Python that runs surgeon; the node compiles it again anyway."""
    from surgeon.surgery import guard

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(grafted.source)
    except SyntaxError:
        _insist(guard.unreadable(grafted.result) is None, "the result is not Python")
    else:
        _insist(False, "the result does not compile, though the source does")


def _insist(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - it is an assertion that -O cannot remove
    if not holds:
        raise DoesNotFitError(
            f"The graft did not come out as intended: {otherwise}. {_KEEP}",
            advice="This is a fault of surgeon's; please report it with the file.",
            code="graft-unproved",
        )


def _refuse(outcome: AlreadyGrafted | NotNeeded | NotFound | Ambiguous | Unparsable) -> NoReturn:
    match outcome:
        case AlreadyGrafted(problem=problem) if problem:
            _refuse_broken(problem, outcome.lines[0].start)
        case AlreadyGrafted():
            raise DoesNotFitError(
                f"An unpatched file is expected; {outcome.patch} {outcome.version} ({outcome.stamp}) is in it.",
                advice="Roll it back first, or leave it.",
                where=f"line {outcome.lines[0].start}",
                code="already-grafted",
            )
        case NotNeeded():
            raise DoesNotFitError(
                f"The patch is not needed: {outcome.reason} Found: {_show(outcome.lines)}. {_KEEP}",
                advice="Use sglang's own; a patch on top of it would re-route what it has routed.",
                where=f"line {outcome.lines[0].number}",
                code="not-needed",
            )
        case NotFound():
            shown = f" Nearest: {_show(outcome.nearest)}." if outcome.nearest else ""
            raise DoesNotFitError(
                f"{outcome.reason} Expected: {'; or '.join(outcome.expected)}.{shown} {_KEEP}",
                advice="This revision of sglang needs a new recipe; report it with this file.",
                where=f"line {outcome.nearest[0].number}" if outcome.nearest else "",
            )
        case Ambiguous():
            raise DoesNotFitError(
                f"{outcome.reason} Found: {_show(outcome.candidates)}. {_KEEP}",
                advice="This revision of sglang needs a new recipe; report it with this file.",
                where=f"line {outcome.candidates[0].number}" if outcome.candidates else "",
            )
        case Unparsable():
            raise DoesNotFitError(
                f"{outcome.reason} {_KEEP}",
                advice="Look whether the file is damaged; the server would not import it either, if so.",
                where=f"line {outcome.line}" if outcome.line is not None else "",
                code="unparsable",
            )


def _show(lines: tuple[Line, ...]) -> str:
    return ", ".join(f"line {line.number} `{line.text.strip()}`" for line in lines)


def _refuse_broken(reason: str, line: int) -> NoReturn:
    raise ForeignEditError(
        f"Surgeon's own lines have been edited: {reason}. {_KEEP}",
        advice="Restore the original from the ledger, or reinstall sglang.",
        where=f"line {line}",
    )


def _refuse_stray_name(source: bytes, module: str) -> None:
    matcher = re.compile(rb"\b%s\b" % re.escape(module.encode("ascii")))
    for number, line in enumerate(split_lines(source), 1):
        if matcher.search(line):
            text = line.decode("utf-8", "replace").strip()
            raise ForeignEditError(
                f"`{module}` is expected only between surgeon's marks; line {number} is `{text}`. {_KEEP}",
                advice="Take that line out, or reinstall sglang.",
                where=f"line {number}",
            )
