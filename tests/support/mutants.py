"""Mutants of real files: what editors, vendors and refactorings do to topk.py, with the site's identity carried along.

The anchor and the function are tagged with a trailing comment each before anything is changed. A mutation moves, wraps
or copies text; whatever it does, the tag stays on the original. The oracle then asks Python's own parser where the
tagged statement is, and knows nothing of how surgeon looks for it.
"""

from __future__ import annotations

import ast
import enum
import functools
import re
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from surgeon.surgery import Grafted

ANCHOR_TAG = "# the-anchor"
FUNCTION_TAG = "# the-function"
NAME = "select_experts"
# The call that the tagged statement makes, newest first: the site of the patch by the facts, not by surgeon's recipes.
CALLS = ("_post_process_topk_ids", "on_select_experts", "record_new_token")
RUNTIME = "_surgeon_oea"
_T = TypeVar("_T")


class Expected(enum.Enum):
    """What surgeon must make of a mutant."""

    FOUND = "found"
    REFUSED = "refused"
    # Either, as long as the oracle agrees with where it grafts.
    EITHER = "either"


@dataclass(frozen=True)
class Mutant:
    """One changed file.

    Attributes:
        source: its bytes.
        kinds: the mutations, in the order in which they were made.
        expected: what must come of it.
    """

    source: bytes
    kinds: tuple[str, ...]
    expected: Expected


class Code:
    """A module's text with its syntax tree, and the two tagged places in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.tree = ast.parse(text)
        self.anchor_line = self._line(ANCHOR_TAG)
        self.function_line = self._line(FUNCTION_TAG)

    def _line(self, tag: str) -> int:
        (line,) = [number for number, text in enumerate(self.lines, 1) if text.endswith(tag)]
        return line

    @functools.cached_property
    def statements(self) -> list[ast.stmt]:
        """Every statement, outer ones first."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]

    @functools.cached_property
    def function(self) -> ast.FunctionDef | ast.AsyncFunctionDef:
        """The tagged function, wherever it is by now."""
        (found,) = [
            node
            for node in self.statements
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.lineno <= self.function_line < node.body[0].lineno
        ]
        return found

    @functools.cached_property
    def anchor(self) -> ast.stmt:
        """The innermost statement on the tagged line; of those that share it, the one that calls something."""
        holding = [node for node in self.statements if covers(node, self.anchor_line)]
        calling = [node for node in holding if isinstance(getattr(node, "value", None), ast.Call)]
        return min(calling or holding, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)

    def indent(self, node: ast.stmt) -> str:
        """What stands before a statement on its first line."""
        line = self.lines[first_line(node) - 1]
        return line[: len(line) - len(line.lstrip())]

    @functools.cached_property
    def step(self) -> str:
        """What one level of indentation adds in the function."""
        return self.indent(self.function.body[0])[len(self.indent(self.function)) :]

    def span(self, node: ast.stmt) -> range:
        """Its lines, counted from 0, decorators included."""
        return range(first_line(node) - 1, node.end_lineno or node.lineno)

    def of(self, node: ast.stmt) -> list[str]:
        """Its lines, without the tags."""
        span = self.span(node)
        return [untagged(line) for line in self.lines[span.start : span.stop]]

    def replaced(self, span: range, lines: Sequence[str]) -> str:
        """The text with other lines in place of some."""
        return "\n".join([*self.lines[: span.start], *lines, *self.lines[span.stop :]])

    def inserted(self, at: int, lines: Sequence[str]) -> str:
        """The text with more lines in front of one, counted from 0."""
        return self.replaced(range(at, at), lines)

    def boundaries(self, within: ast.AST) -> list[ast.stmt]:
        """Statements in front of which another could stand: first on their line, and no `elif`, docstring or future."""
        lead = self.tree.body[0] if ast.get_docstring(self.tree) else None
        late = max(
            (n.lineno for n in self.tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"), default=0
        )
        return [
            node
            for node in (self.statements if within is self.tree else ast.walk(within))
            if isinstance(node, ast.stmt)
            and node is not within
            and node is not lead
            and node.lineno > late
            and not self.lines[node.lineno - 1][: node.col_offset].strip()
            and not self.lines[node.lineno - 1].lstrip().startswith("elif")
        ]


def covers(node: ast.stmt, line: int) -> bool:
    """Whether a line, counted from 1, is one of a statement's."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def first_line(node: ast.stmt) -> int:
    """Its first line, counted from 1, decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def untagged(line: str) -> str:
    """A line without its tag, if it has one."""
    return line.removesuffix(ANCHOR_TAG).removesuffix(FUNCTION_TAG).rstrip() if "# the-" in line else line


def tagged(source: bytes) -> str:
    """A release's topk.py with the two tags in.

    Args:
        source: as in the wheel.
    """
    text = source.decode()
    lines = text.split("\n")
    (function,) = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == NAME]
    anchor = next(
        statement
        for call in CALLS
        for statement in function.body
        if isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.Call)
        if _called(statement.value) == call
    )
    for number, tag in ((anchor.end_lineno or anchor.lineno, ANCHOR_TAG), (function.lineno, FUNCTION_TAG)):
        lines[number - 1] = f"{lines[number - 1]}  {tag}"
    return "\n".join(lines)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def shortened(text: str, keep: int = 3) -> str:
    """The imports, the function, and some short functions around it: the same site in a file that is quick to read.

    Args:
        text: a tagged file.
        keep: how many other functions.
    """
    code = Code(text)
    function = code.function
    others = [n for n in code.tree.body if isinstance(n, ast.FunctionDef) and n is not function]
    short = sorted(others, key=lambda node: len(code.span(node)))[:keep]
    kept = [n for n in code.tree.body if n is function or n in short or isinstance(n, ast.Import | ast.ImportFrom)]
    return "\n\n\n".join("\n".join(code.lines[code.span(n).start : code.span(n).stop]) for n in kept) + "\n"


@dataclass(frozen=True)
class Mutation:
    """One way to change a file.

    Attributes:
        kind: its name.
        expected: what must come of a file changed in this way alone.
        change: makes the new text, tags kept; None where it does not apply.
        undoes: whether it may take away what another mutation did.
    """

    kind: str
    expected: Expected
    change: Callable[[random.Random, Code], str | None]
    undoes: bool = False


@dataclass(frozen=True)
class Encoding:
    """One way to write the text as bytes; last, since the others work on text.

    Attributes:
        kind: its name.
        encode: text to bytes; None where it does not apply.
    """

    kind: str
    encode: Callable[[random.Random, str], bytes | None]


def mutate(rng: random.Random, text: str, mutations: Sequence[Mutation], encoding: Encoding | None) -> Mutant | None:
    """Change a file in several ways, one after the other.

    Args:
        rng: decides the details.
        text: a tagged file.
        mutations: in order.
        encoding: how the result is written; None for UTF-8.

    Returns:
        None where one of them does not apply, or the result is not Python: that would be a test of the parser.
    """
    try:
        for mutation in mutations:
            changed = mutation.change(rng, Code(text))
            if changed is None or changed == text:
                return None
            compile(changed, "mutant", "exec", dont_inherit=True)
            text = changed
        source = text.encode() if encoding is None else encoding.encode(rng, text)
        if source is None:
            return None
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    kinds = (*(mutation.kind for mutation in mutations), *([encoding.kind] if encoding is not None else []))
    return Mutant(source, kinds, _expected(mutations))


def _expected(mutations: Sequence[Mutation]) -> Expected:
    wanted = {mutation.expected for mutation in mutations}
    undoes = any(mutation.undoes for mutation in mutations)
    if Expected.EITHER in wanted or (undoes and Expected.REFUSED in wanted):
        return Expected.EITHER
    return Expected.REFUSED if Expected.REFUSED in wanted else Expected.FOUND


def check(mutant: bytes, grafted: Grafted) -> None:
    """The oracle: the call is right before the tagged statement of the tagged function, and nothing else is new.

    Args:
        mutant: the file before.
        grafted: what surgeon made of it.
    """
    tree, before = ast.parse(grafted.result), ast.parse(mutant)
    lines = re.split("\r\n|\r|\n", _decoded(grafted.result))
    anchor = _only([number for number, line in enumerate(lines, 1) if line.endswith(ANCHOR_TAG)])
    top = _only([number for number, line in enumerate(lines, 1) if line.endswith(FUNCTION_TAG)])
    function = _only([n for n in tree.body if isinstance(n, ast.FunctionDef) and n.lineno <= top < n.body[0].lineno])
    assert function.name == NAME
    index = _only([i for i, statement in enumerate(function.body) if covers(statement, anchor)])
    assert isinstance(function.body[index], ast.Assign | ast.Expr)
    call = function.body.pop(index - 1)
    assert _is_the_call(call)
    place = _only(
        [i for i, statement in enumerate(tree.body) if isinstance(statement, ast.ImportFrom) and _imports(statement)]
    )
    assert place < tree.body.index(function)
    del tree.body[place]
    assert RUNTIME not in {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}
    assert ast.dump(tree) == ast.dump(before)
    kept = grafted.result.splitlines(keepends=True)
    for block in reversed(grafted.inserted):
        del kept[block.start - 1 : block.stop - 1]
    assert b"".join(kept) == mutant


def _only(found: Sequence[_T]) -> _T:
    assert len(found) == 1, f"one is expected, {len(found)} are there: {found}"
    return found[0]


def _decoded(source: bytes) -> str:
    return source.decode(tokenize.detect_encoding(BytesIO(source).readline)[0])


def _imports(statement: ast.ImportFrom) -> bool:
    return [alias.name for alias in statement.names] == [RUNTIME]


def _is_the_call(statement: ast.stmt) -> bool:
    match statement:
        case ast.If(
            test=ast.Attribute(value=ast.Name(id="_surgeon_oea"), attr="active"),
            body=[ast.Assign(targets=[ast.Tuple() as target], value=ast.Call(args=arguments, keywords=keywords))],
            orelse=[],
        ):
            return (
                ast.unparse(target) == "(topk_weights, topk_ids)"
                and [ast.unparse(one) for one in arguments] == ["topk_weights", "topk_ids", "router_logits"]
                and all(keyword.arg == ast.unparse(keyword.value) for keyword in keywords)
            )
        case _:
            return False


def formatted(text: str, *settings: str) -> str:
    """The text as ruff's formatter writes it.

    Args:
        text: Python.
        settings: as for ``ruff format --config``.
    """
    options = [word for setting in settings for word in ("--config", setting)]
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--no-cache", *options, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def renamed(text: str, lines: range, old: str, new: str) -> str:
    """A name replaced wherever it is a variable within some lines; attributes and keywords of calls are left.

    Args:
        text: Python.
        lines: counted from 1.
        old: the name.
        new: the other name.
    """
    found = list(_variables(text, lines, old))
    split = text.split("\n")
    for row, column in reversed(found):
        line = split[row - 1]
        split[row - 1] = line[:column] + new + line[column + len(old) :]
    return "\n".join(split)


def _variables(text: str, lines: range, name: str) -> Iterator[tuple[int, int]]:
    tokens = list(tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__))
    depth = 0
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        depth += (
            {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.string, 0) if token.type == tokenize.OP else 0
        )
        keyword = after.string == "=" and depth > 0
        variable = token.type == tokenize.NAME and token.string == name and before.string != "." and not keyword
        if variable and token.start[0] in lines:
            yield token.start
