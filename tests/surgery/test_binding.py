"""Definite assignment, compared with what really is bound when generated programs run."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import libcst as cst
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.surgery.binding import definitely_bound

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIMPLE = st.sampled_from(
    [
        "a = 1",
        "b = 1",
        "a, (b, *c) = 1, (2, 3)",
        "(a := 1)",
        "b: int = (c := 2)",
        "d: int",
        "a += 1",
        "import os.path",
        "from os import path as b",
        "del a",
        "del (b, c)",
        "assert (d := 1)",
        "boom()",
        "pick() and (c := 1)",
        "(b := 0) or (c := 1)",
        "c = (a := 1) if pick() else (b := 2)",
        "c = 1 < (d := pick()) < (a := 2)",
        "[(b := i) for i in range(pick())]",
        "lambda: (c := 1)",
        "def c(): pass",
        "class d: a = 1",
        "g = 1",
        "pass",
    ]
)
_LEAVING = st.sampled_from(["return", "raise KeyError"])
_LOOP_LEAVING = st.sampled_from(["break", "continue"])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@st.composite
def _block(draw: st.DrawFn, depth: int, *, loop: bool = False, leave: bool = True) -> list[str]:
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        lines += draw(_statement(depth, loop=loop, leave=leave))
    if leave and draw(st.integers(0, 5)) == 0:
        lines.append(draw(_LEAVING))
    elif loop and leave and draw(st.integers(0, 3)) == 0:
        lines.append(draw(_LOOP_LEAVING))
    return lines


@st.composite
def _statement(draw: st.DrawFn, depth: int, *, loop: bool, leave: bool) -> list[str]:
    kinds = ["simple", "simple"] + (["if", "for", "while", "forever", "try", "with", "match"] if depth else [])
    kind = draw(st.sampled_from(kinds))

    def inner(*, in_loop: bool = loop, may_leave: bool = leave) -> list[str]:
        return _indented(draw(_block(depth - 1, loop=in_loop, leave=may_leave)))

    if kind == "if":
        lines = ["if pick():", *inner()]
        lines += ["elif (d := pick()):", *inner()] if draw(st.booleans()) else []
        return lines + (["else:", *inner()] if draw(st.booleans()) else [])
    if kind in {"for", "while"}:
        head = "for c in range(pick()):" if kind == "for" else "while (c := pick()):"
        return [head, *inner(in_loop=True)] + (["else:", *inner()] if draw(st.booleans()) else [])
    if kind == "forever":
        return ["while True:", "    if pick(): break", *inner(in_loop=True), "    pick()"]
    if kind == "try":
        lines = ["try:", *inner()]
        handled = draw(st.booleans())
        lines += ["except ValueError as b:", *inner()] if handled else []
        lines += ["except Exception:", *inner()] if handled and draw(st.booleans()) else []
        lines += ["else:", *inner()] if handled and draw(st.booleans()) else []
        final = not handled or draw(st.booleans())
        return lines + (["finally:", *inner(in_loop=False, may_leave=False)] if final else [])
    if kind == "with":
        return ["with swallow() as d:", *inner()]
    if kind == "match":
        return ["match pick():", "    case 1:", *_indented(inner()), "    case _:", *_indented(inner())]
    return [draw(_SIMPLE)]


class _Stop(BaseException):
    """Ends a run that has used up its coin tosses."""


@contextlib.contextmanager
def _swallow() -> Iterator[int]:
    with contextlib.suppress(Exception):
        yield 1


def _bound(program: str) -> frozenset[str]:
    (function,) = cst.parse_module(program).body
    assert isinstance(function, cst.FunctionDef)
    return definitely_bound(function, len(function.body.body) - 1)


def _observed(program: str, seed: int) -> frozenset[str] | None:
    coin = random.Random(seed)  # noqa: S311 - a reproducible choice of branches
    tosses = iter(range(30))
    seen: list[frozenset[str]] = []

    def pick() -> int:
        if next(tosses, None) is None:
            raise _Stop
        return coin.randrange(2)

    def boom() -> None:
        if pick():
            raise ValueError

    space: dict[str, Any] = {"pick": pick, "boom": boom, "swallow": _swallow, "probe": seen.append}
    exec(program, space)  # noqa: S102 - running the generated program is the test
    with contextlib.suppress(_Stop, Exception):
        space["f"](1)
    return frozenset(seen[0]) if seen else None


def _program(lines: list[str]) -> str:
    return "\n".join(["def f(p, *args, **kwargs):", *_indented(["global g", *lines, "probe(frozenset(locals()))"]), ""])


@given(_block(2, leave=True))
@settings(max_examples=100, deadline=None)
def test_what_is_called_bound_is_bound_in_every_run(lines: list[str]) -> None:
    """No run of a program, whatever branches it takes, reaches the site without a name that was promised."""
    program = _program(lines)
    bound = _bound(program)
    for seed in range(6):
        seen = _observed(program, seed)
        assert seen is None or bound <= seen, program


@pytest.mark.parametrize(
    ("lines", "bound"),
    [
        (["if pick():", "    a = 1", "else:", "    a = 2"], {"a"}),
        (["if pick():", "    a = 1"], set()),
        (["if pick():", "    a = 1", "else:", "    raise ValueError"], {"a"}),
        (["if pick():", "    a = b = 1", "elif pick():", "    a = 1", "else:", "    return"], {"a"}),
        (["for a in range(pick()):", "    b = 1"], set()),
        (["while True:", "    a = 1", "    if pick(): break", "    b = 2"], {"a"}),
        (["try:", "    a = 1", "except ValueError as e:", "    a = 2"], {"a"}),
        (["try:", "    boom()", "    a = 1", "except ValueError:", "    b = 2"], set()),
        (["try:", "    boom()", "finally:", "    a = 1"], {"a"}),
        (["with swallow() as a:", "    b = 1"], set()),
        (["a = 1", "del a"], set()),
        (["e = 1", "try:", "    boom()", "except ValueError as e:", "    pass"], set()),
        (["assert (a := 1)"], set()),
        (["global a", "a = 1"], set()),
        (["import os.path", "from os import sep as s"], {"os", "s"}),
        (["a = 1", "def inner():", "    nonlocal a", "    del a", "inner()"], {"inner"}),
    ],
)
def test_each_kind_of_statement(lines: list[str], bound: set[str]) -> None:
    """What each construct binds for certain, by the language reference."""
    program = "\n".join(["def f(p, *args, q, **kwargs):", *_indented([*lines, "probe(frozenset(locals()))"]), ""])
    assert _bound(program) == bound | {"p", "q", "args", "kwargs"}
