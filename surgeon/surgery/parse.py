"""Source bytes to a LibCST tree, and places in the tree back to lines of the source.

A file that nobody has vouched for is parsed in a child process only; `guard` says why.
"""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from surgeon.surgery.outcomes import Unparsable
from surgeon.surgery.text import split_bom, split_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARK = "# \u27e8here\u27e9"
_LINE = re.compile(r"error at (\d+):")


class Unmappable(Exception):  # noqa: N818 - not an error of the user's: locate answers it as Unparsable
    """The tree does not give back the bytes it was read from, so a place in it has no certain line."""


@dataclass(frozen=True, eq=False)
class Parsed:
    """A module that LibCST has read.

    Attributes:
        module: the tree.
        bom: the byte order mark, or nothing.
        lines: the rest of the file in lines, each with its own line end.
        encoding: the codec of the text after the byte order mark.
    """

    module: cst.Module
    bom: bytes
    lines: tuple[bytes, ...]
    encoding: str

    def text(self, line: int) -> str:
        """One line without its line end, for people to read.

        Args:
            line: counted from 1.
        """
        return self.lines[line - 1].decode(self.encoding, "replace").rstrip("\r\n")

    def start(self, index: int) -> int:
        """How many lines stand above a top-level statement, its own leading comments and blanks not counted.

        Args:
            index: which statement of the module's body.

        Raises:
            Unmappable: those lines are not what the tree says.
        """
        if index == 0 and not self.module.header:
            return 0
        found = self._found_once(self.module.body[index])
        if found is not None:
            return found
        above = self.module.with_changes(body=self.module.body[:index], footer=(), has_trailing_newline=True).code
        return self._count(above, "")

    def _found_once(self, statement: cst.CSTNode) -> int | None:
        """As `start`, where the statement's own text with what leads it stands exactly once in the file: quicker."""
        code = self.module.code_for_node(statement)
        text = b"".join(self.lines).decode(self.encoding)
        place = text.find(code)
        if place < 0 or text.find(code, place + 1) >= 0 or not (place == 0 or text[place - 1] in "\r\n"):
            return None
        return len(split_lines(text[:place].encode(self.encoding)))

    def start_in(self, function: cst.FunctionDef | cst.ClassDef, top: int, statement: cst.BaseStatement) -> int:
        """How many lines stand above a statement inside a function or class, its leading comments not counted.

        Args:
            function: a top-level function or class of the module.
            top: how many lines stand above it, by `start`.
            statement: a statement anywhere inside it.

        Raises:
            Unmappable: those lines are not what the tree says.
        """
        before = b"".join(self.lines[:top]).decode(self.encoding)
        block = function.body
        index = next((place for place, one in enumerate(block.body) if one is statement), 0)
        if index and isinstance(block, cst.IndentedBlock):
            # A statement of the function's own body: what stands above it is written out without a walk of the tree.
            head = function.with_changes(body=block.with_changes(body=block.body[:index], footer=()))
            return self._count(self.module.code_for_node(head), before)
        marked = function.deep_replace(statement, statement.with_changes(leading_lines=[_marked_line()]))
        above = self.module.code_for_node(marked).partition(_MARK)[0].rstrip(" \t\f")
        return self._count(above, before)

    def _count(self, text: str, before: str) -> int:
        whole = before + text
        count = len(split_lines(whole.encode(self.encoding)))
        source = b"".join(self.lines[:count]).decode(self.encoding)
        # LibCST drops form feeds in indentation; they end no line, so the count holds without them.
        if whole.replace("\f", "") != source.replace("\f", ""):
            raise Unmappable(f"LibCST does not give back the first {count} lines as they are in the file.")
        return count


def _marked_line() -> cst.EmptyLine:
    return cst.EmptyLine(comment=cst.Comment(_MARK))


@functools.lru_cache(maxsize=1)
def parse(source: bytes) -> Parsed | Unparsable:
    """Read a Python file.

    Args:
        source: the file as it is, with byte order mark, coding cookie and line ends.

    Returns:
        The tree, or why there is none. Nothing that a file can hold makes it raise; but LibCST's native parser can
        end the process, or not come back for minutes.
    """
    nul = source.find(b"\0")
    if nul >= 0:
        # LibCST lets one pass in comments and strings; no Python imports such a file.
        return _unparsable(source, "It does not parse: it holds a NUL byte.", len(split_lines(source[: nul + 1])))
    too_deep, refused = _by_python(source)
    if too_deep:
        return _unparsable(source, f"Python gives up on it: {too_deep}", None)
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        # LibCST's own line is right only where its message names it, in errors of the parser; for those of the
        # tokenizer it is always the first.
        named = _LINE.search(error.message)
        return _unparsable(source, f"It does not parse: {error.message}", int(named[1]) if named else refused)
    except (KeyboardInterrupt, SystemExit):
        raise
    except MemoryError:
        return _unparsable(source, "LibCST ran out of memory on it: it is too long.", None)
    except BaseException as error:  # noqa: BLE001 - LibCST's native parser panics with a BaseException
        return _unparsable(source, f"It does not parse: {type(error).__name__}: {error}", None)
    bom, rest = split_bom(source)
    encoding = "utf-8" if module.encoding == "utf-8-sig" else module.encoding
    return Parsed(module, bom, split_lines(rest), encoding)


def _by_python(source: bytes) -> tuple[str, int | None]:
    """Ask Python's own parser first.

    Returns:
        Why it refuses such nesting, or nothing. LibCST's native parser would be slow on that, or overflow its stack;
        Python knows limits that LibCST does not, though not all that LibCST crashes on. Then the line of any other
        syntax error, which is LibCST's to judge: the file may be for a newer Python than this one.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "topk.py", "exec", dont_inherit=True)
    except (RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: its code is nested too deeply, or too long", None
    except SyntaxError as error:
        return error.msg if error.msg.startswith("too many") else "", error.lineno
    except ValueError:
        return "", None
    return "", None


def _unparsable(source: bytes, reason: str, line: int | None) -> Unparsable:
    lines: Sequence[bytes] = split_lines(source)
    known = line is not None and 1 <= line <= len(lines)
    text = lines[line - 1].decode("utf-8", "replace").rstrip("\r\n") if known and line is not None else ""
    return Unparsable(f"{reason.rstrip('. ')}.", line, text)
