"""Files as editors, copies and accidents leave them: each is cut at the right line and whole otherwise, or refused."""

from __future__ import annotations

import ast
import codecs
import warnings
from typing import TYPE_CHECKING

import libcst as cst
import pytest

from surgeon.errors import DoesNotFitError
from surgeon.surgery import Found, GraftSpec, NotFound, Unparsable, graft, locate, ungraft
from surgeon.surgery.parse import parse

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = GraftSpec("oea", "0.1.0", "0123456789ab")
HEAD = "def select_experts(hidden_states, router_logits, top_k):\n    topk_weights, topk_ids = leaf(router_logits)\n"
TAIL = "    recorder().on_select_experts(topk_ids=topk_ids)\n    return topk_weights, topk_ids\n"
TEXT = HEAD + TAIL
GOOD = TEXT.encode()
ANCHOR = b"recorder().on_select_experts(topk_ids=topk_ids)"

READ = {
    "CRLF": (TEXT.replace("\n", "\r\n").encode(), 3),
    "CR": (TEXT.replace("\n", "\r").encode(), 3),
    "LF, then CR": ((HEAD + TAIL.replace("\n", "\r")).encode(), 3),
    "CR, then CRLF": ((HEAD.replace("\n", "\r") + TAIL.replace("\n", "\r\n")).encode(), 3),
    "CR, CRLF, LF": ((HEAD.replace("\n", "\r") + TAIL.replace("\n", "\r\n", 1)).encode(), 3),
    "a lone CR in a comment": (b"# a\rb = 1\n" + GOOD, 5),
    "a lone CR in a string": (b"x = '''a\rb'''\n" + GOOD, 5),
    "a backslash before CR": ((HEAD.replace("= leaf", "= \\\r leaf") + TAIL).encode(), 4),
    "a form feed on a line of its own": (f"\f\n{HEAD}    \f\n{TAIL}".encode(), 5),
    "a form feed before the indentation": (f"{HEAD}\f{TAIL}".encode(), 3),
    "what str.splitlines takes for line ends": ("# a\x0bb\x1cc\x85d\u2028e\n".encode() + GOOD, 4),
    "tabs": (TEXT.replace("    ", "\t").encode(), 3),
    "byte order mark": (codecs.BOM_UTF8 + GOOD, 3),
    "byte order mark and its cookie": (codecs.BOM_UTF8 + b"# coding: utf-8-sig\n" + GOOD, 4),
    "utf-8-sig without the mark": (b"# coding: utf-8-sig\n" + GOOD, 4),
    "latin-1": (b"# coding: latin-1\nx = '\xe9\x85'\n" + GOOD, 5),
    "latin-1 in the second line": (b"#!/usr/bin/env python\n# coding: latin-1\nx = '\xe9'\n" + GOOD, 6),
    "shift_jis, with a backslash in a letter": (b"# coding: shift_jis\nx = '\x83\x5c'\n" + GOOD, 5),
    "gbk": ("# coding: gbk\nx = '\u4e2d'\n".encode("gbk") + GOOD, 5),
    "no end of the last line": (GOOD.rstrip(), 3),
    "a warning of Python's compiler": (b"x = '\\d'\n" + GOOD, 4),
    "3.10": (b"match x:\n    case 1: pass\n" + GOOD, 5),
    "3.11": (b"try:\n    pass\nexcept* A:\n    pass\n" + GOOD, 7),
    "3.12": (b"type A[T] = list[T]\ndef f[T](x: T) -> T: return x\nx = f'{'a' + f'{'b'}'}'\n" + GOOD, 6),
    "3.13": (b"def f[T: int = int](x: T) -> T: return x\n" + GOOD, 4),
    "3.14": (b"x = t'{y}'\ntry:\n    pass\nexcept A, B:\n    pass\n" + GOOD, 8),
}


@pytest.mark.parametrize("name", READ)
def test_what_can_be_read_is_cut_where_it_should_be(name: str) -> None:
    """The anchor's line as counted by hand, and every byte back; where this Python can read it, it must agree."""
    source, line = READ[name]
    site = locate(source)
    assert isinstance(site, Found)
    assert (site.line, site.text.strip()) == (line, ANCHOR.decode())
    grafted = graft(source, SPEC)
    assert ungraft(grafted.result) == source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(grafted.result)
    except SyntaxError:
        assert name.startswith("3.1")
        return
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "select_experts")
    leaf, call, anchor, _ = map(ast.unparse, function.body)
    assert leaf.endswith("leaf(router_logits)")
    assert call.startswith("if _surgeon_oea.active:")
    assert anchor.encode() == ANCHOR


REFUSED = {
    "a tab that is eight blanks": (
        (HEAD.replace("    ", " " * 8) + TAIL.replace("    ", "\t")).encode(),
        "inconsistent mixing of tabs and spaces",
        3,
    ),
    "a byte order mark that a cookie denies": (codecs.BOM_UTF8 + b"# coding: latin-1\n" + GOOD, "encoding", None),
    "a cookie that lies": (b"# coding: ascii\nx = '\xc3\xa9'\n" + GOOD, "'ascii' codec", None),
    "no cookie for latin-1": (b"x = '\xe9'\n" + GOOD, "encoding declaration", None),
    "a cookie too far down": (b"\n\n# coding: latin-1\nx = '\xe9'\n" + GOOD, "'utf-8' codec", None),
    "an encoding that there is not": (b"# coding: no-such\n" + GOOD, "unknown encoding: no-such", None),
    "an encoding that is none of text": (b"# coding: rot13\n" + GOOD, "not a text encoding", None),
    "UTF-16": (TEXT.encode("utf-16-le"), "NUL", 1),
    "UTF-16 with its mark": (TEXT.encode("utf-16"), "NUL", 1),
    "half a surrogate": (b"x = '\xed\xa0\x80'\n" + GOOD, "encoding", None),
    "NUL": (GOOD + b"\0", "NUL", 5),
    "NUL in a comment": (b"x = 1\r\n# \0\n" + GOOD, "NUL", 2),
    "NUL in a string": (b"x = '\0'\n" + GOOD, "NUL", 1),
    "the end of a file as DOS wrote it": (GOOD + b"\x1a", "not a valid character", 5),
    "Python 2": (b"print 'x'\n" + GOOD, "parser error", 1),
    "syntax of no Python yet": (b"x = y ?? z\n" + GOOD, "not a valid character", 1),
    "a half-merged file": (GOOD + b"<<<<<<< HEAD\n", "", 5),
    "half a file": (GOOD[:-20] + b"(", "", 4),
    "two byte order marks": (codecs.BOM_UTF8 * 2 + GOOD, "", None),
    "what LibCST raises TypeError on": (b"x = () if 0 else(lambda:())\n" + GOOD, "TypeError", None),
    "an archive": (b"\x1f\x8b\x08\0\0\0" + bytes(range(256)), "NUL", 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    """With the reason, the line where there is one, and the file as it was."""
    source, reason, line = REFUSED[name]
    kept = bytearray(source)
    outcome = locate(source)
    assert isinstance(outcome, Unparsable)
    assert reason in outcome.reason
    if line is not None:
        assert outcome.line == line
    with pytest.raises(DoesNotFitError, match=r"\. The file was left as it is\.$") as caught:
        graft(source, SPEC)
    assert caught.value.code == "unparsable"
    assert source == kept


@pytest.mark.parametrize("source", [b"", b"\n", codecs.BOM_UTF8, b"\f", b"# only a comment"])
def test_an_empty_file_has_no_function(source: bytes) -> None:
    """It can be read, and nothing is in it."""
    assert isinstance(locate(source), NotFound)


def _raising(error: BaseException) -> Callable[[bytes], cst.Module]:
    def parse_module(_: bytes) -> cst.Module:
        raise error

    return parse_module


class PanicException(BaseException):
    """What a panic of LibCST's native parser reaches Python as: no Exception."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PanicException("index out of range"), "PanicException: index out of range"),
        (MemoryError(), "ran out of memory"),
        (TypeError("super(type, obj)"), "TypeError: super(type, obj)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "invalid start byte"),
    ],
)
def test_whatever_the_parser_raises_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    """LibCST 1.9 panics on nothing that is known; 1.0.1 did, on mixed line ends."""
    monkeypatch.setattr(cst, "parse_module", _raising(error))
    answer = parse(b"x = %r\n" % said.encode())
    assert isinstance(answer, Unparsable)
    assert said in answer.reason


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_a_wish_to_stop_is_no_answer(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Ctrl-C during parsing goes through."""
    monkeypatch.setattr(cst, "parse_module", _raising(error))
    with pytest.raises(type(error)):
        parse(b"y = 1  # %r\n" % type(error).__name__.encode())
