"""The ways in which mutants differ from the real file, each with what surgeon must make of it.

It is long because it is one list: each way is a few lines, and the table at the end names them all.
"""

from __future__ import annotations

import ast
import codecs
from typing import TYPE_CHECKING

from tests.support.mutants import (
    CALLS,
    NAME,
    Code,
    Encoding,
    Expected,
    Mutation,
    first_line,
    formatted,
    renamed,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

FOUND, REFUSED, EITHER = Expected.FOUND, Expected.REFUSED, Expected.EITHER

_LICENCE = (
    "# Licensed under the Apache License, Version 2.0 (the 'License');",
    "# you may not use this file except in compliance with the License.",
    "#",
)
_FLAG = "_mutant_flag"


def _fresh(rng: random.Random) -> str:
    return f"_mutant_{rng.randrange(10**6)}"


def _somewhere(rng: random.Random, code: Code) -> ast.stmt:
    """A statement of the function as often as one of the rest; the anchor or the one after it often enough."""
    function, anchor = code.function, code.anchor
    near = [node for node in code.boundaries(function) if node is anchor or node.lineno > anchor.lineno]
    choices = (code.boundaries(code.tree), code.boundaries(function), near)
    return rng.choice(rng.choice([one for one in choices if one]))


def _above(rng: random.Random, code: Code) -> ast.stmt:
    """A statement of the function's own body, not below the anchor."""
    return rng.choice([n for n in code.function.body if n.lineno <= code.anchor.lineno])


def _lines_before(make: Callable[[random.Random, str, str], list[str]]) -> Callable[[random.Random, Code], str | None]:
    """A change that adds lines in front of some statements."""

    def change(rng: random.Random, code: Code) -> str | None:
        for _ in range(rng.randint(1, 3)):
            node = _somewhere(rng, code)
            code = Code(code.inserted(first_line(node) - 1, make(rng, code.indent(node), code.step)))
        return code.text

    return change


def _blank(rng: random.Random, indent: str, _: str) -> list[str]:
    return [rng.choice(["", indent, "  ", "\f"]) for _ in range(rng.randint(1, 3))]


def _comment(rng: random.Random, indent: str, _: str) -> list[str]:
    words = rng.choice([f"TODO {_fresh(rng)}", "fmt: off", f"{NAME}(topk_ids=topk_ids)", "\u4e13\u5bb6", ""])
    return [f"{rng.choice([indent, indent, '', indent + ' '])}# {words}"] * rng.randint(1, 3)


def _statement(rng: random.Random, indent: str, step: str) -> list[str]:
    name = _fresh(rng)
    return rng.choice(
        [
            [f"{indent}{name} = {rng.randrange(99)}"],
            [f"{indent}if {_FLAG}:", f"{indent}{step}{name} = (", f"{indent}{step}{step}1,", f"{indent}{step})"],
            [f"{indent}for {name} in {_FLAG}:", f"{indent}{step}break"],
            [f"{indent}assert True, '{name}'"],
            [f"{indent}{name} = lambda: (yield)"],
            [f"{indent}def {name}(topk_ids=None):", f"{indent}{step}return topk_ids"],
            [f"{indent}class {name}:", f"{indent}{step}def {NAME}(self): return self.topk_ids"],
            [f"{indent}with {_FLAG}:", f"{indent}{step}{name} = 1"],
            [f"{indent}import os as {name}; del {name}"],
        ]
    )


def _licence(rng: random.Random, code: Code) -> str | None:
    text = rng.choice([_LICENCE, (*_LICENCE, ""), ("#!/usr/bin/env python3", *_LICENCE), _LICENCE * 5])
    return code.inserted(0, text)


def _docstring(_: random.Random, code: Code) -> str | None:
    function = code.function
    if ast.get_docstring(function) is not None:
        return None
    first = function.body[0]
    indent = code.indent(first)
    return code.inserted(first_line(first) - 1, [f'{indent}"""Choose experts.', "", f"{indent}{NAME}(", f'{indent}"""'])


def _reformatted(rng: random.Random, code: Code) -> str | None:
    end = (code.anchor.end_lineno, code.anchor.end_col_offset or 0)
    if any(node.lineno == end[0] and node.col_offset >= end[1] for node in code.statements):
        # The formatter gives each statement a line of its own, and the last of them the tag.
        return None
    width = rng.choice([60, 72, 79, 100, 120, 160, 240])
    settings = [f"line-length={width}"]
    settings += rng.choice([[], ["format.quote-style='single'"], ["format.skip-magic-trailing-comma=true"]])
    settings += rng.choice([[], [], ["indent-width=2"], ["format.indent-style='tab'"]])
    return formatted(code.text, *settings)


def _reordered(rng: random.Random, code: Code) -> str | None:
    blocks = [n for n in code.tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if len(blocks) < 2:
        return None
    one, other = sorted(rng.sample(blocks, 2), key=first_line)
    first, second = code.span(one), code.span(other)
    lines = code.lines
    return "\n".join(
        [
            *lines[: first.start],
            *lines[second.start : second.stop],
            *lines[first.stop : second.start],
            *lines[first.start : first.stop],
            *lines[second.stop :],
        ]
    )


def _own_names(code: Code) -> list[str]:
    function = code.function
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given = {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}
    return sorted(stored - given - {"topk_ids", "topk_weights", "router_logits"})


def _other_local(rng: random.Random, code: Code) -> str | None:
    names = _own_names(code)
    return _with_name(rng, code, rng.choice(names)) if names else None


def _with_name(rng: random.Random, code: Code, old: str) -> str:
    span = code.span(code.function)
    return renamed(code.text, range(span.start + 1, span.stop + 1), old, f"{old}_{rng.randrange(99)}")


def _renaming(old: str) -> Callable[[random.Random, Code], str | None]:
    return lambda rng, code: _with_name(rng, code, old)


def _parameter(rng: random.Random, code: Code) -> str | None:
    line = code.function_line - 1
    name, rest = code.lines[line].split("(", 1)
    if rest.split("#")[0].strip():
        return None
    return code.replaced(range(line, line + 1), [f"{name}({rest}", f"{code.step}{_fresh(rng)},"])


def _branch(*body: str) -> Callable[[random.Random, Code], str | None]:
    """One more branch in a chain of the function's own body that binds the ids, before its next `elif` or `else`."""

    def change(rng: random.Random, code: Code) -> str | None:
        links = []
        # The first statement that binds them is the chain; what comes later only changes them.
        for node in [n for n in code.function.body if _binds_ids([n])][:1]:
            link: ast.stmt = node
            while (
                isinstance(link, ast.If) and link.orelse and _binds_ids(link.body) and link.lineno < code.anchor.lineno
            ):
                links.append(link)
                link = link.orelse[0]
        if not links:
            return None
        link = rng.choice(links)
        indent = code.indent(link)
        last = link.body[-1].end_lineno or 0
        at = next(
            i for i in range(last, len(code.lines)) if code.lines[i].startswith((f"{indent}elif", f"{indent}else"))
        )
        return code.inserted(
            at, [f"{indent}elif {_FLAG}({rng.randrange(99)}):", *(indent + code.step + b for b in body)]
        )

    return change


def _binds_ids(body: Sequence[ast.stmt]) -> bool:
    return any(
        isinstance(n, ast.Name) and n.id == "topk_ids" and isinstance(n.ctx, ast.Store)
        for s in body
        for n in ast.walk(s)
    )


def _copy_elsewhere(rng: random.Random, code: Code) -> str | None:
    """The anchor once more, in another function."""
    base, step = code.indent(code.anchor), code.step
    body = [step + line.removeprefix(base) for line in code.of(code.anchor)]
    return code.text + "\n".join(["", "", f"def {_fresh(rng)}(topk_ids, topk_weights, **_):", *body, ""])


def _whole_copy(rng: random.Random, code: Code) -> str | None:
    """The whole function once more, under another name, above or below."""
    lines = code.of(code.function)
    copy = [line.replace(f"def {NAME}", f"def {_fresh(rng)}") for line in lines]
    at = rng.choice([first_line(code.function) - 1, len(code.lines)])
    return code.inserted(at, [*copy, "", ""])


def _namesake(rng: random.Random, code: Code) -> str | None:
    """A method, or a nested function, of the same name."""
    head = rng.choice([f"class {_fresh(rng)}:", f"def {_fresh(rng)}():"])
    base = code.indent(code.function)
    body = [code.step + line.removeprefix(base) if line else line for line in code.of(code.function)]
    at = rng.choice([first_line(code.function) - 1, len(code.lines)])
    return code.inserted(at, [head, *body, "", ""])


def _decorated(rng: random.Random, code: Code) -> str | None:
    indent = code.indent(code.function)
    decorator = rng.choice(["@_mutant", "@_mutant.compile(dynamic=True)", "@property"])
    return code.inserted(first_line(code.function) - 1, [f"{indent}{decorator}"])


def _twice(rng: random.Random, code: Code) -> str | None:
    """The anchor once more, at the same level."""
    span = code.span(code.anchor)
    return code.inserted(rng.choice([span.start, span.stop]), code.of(code.anchor))


def _twice_nested(rng: random.Random, code: Code) -> str | None:
    """The anchor once more, in a block."""
    indent, span = code.indent(code.anchor), code.span(code.anchor)
    head = rng.choice(
        [f"if {_FLAG}:", f"for _ in {_FLAG}:", f"with {_FLAG}:", "def _mutant_inner():", "class _Mutant:"]
    )
    body = [code.step + line for line in code.of(code.anchor)]
    return code.inserted(rng.choice([span.start, span.stop]), [f"{indent}{head}", *body])


def _into(head: str, *tail: str) -> Callable[[random.Random, Code], str | None]:
    """The anchor moved into a block."""

    def change(_: random.Random, code: Code) -> str | None:
        indent, span = code.indent(code.anchor), code.span(code.anchor)
        body = [code.step + line for line in code.lines[span.start : span.stop]]
        return code.replaced(span, [f"{indent}{head}", *body, *(f"{indent}{line}" for line in tail)])

    return change


def _wrapped(rng: random.Random, code: Code) -> str | None:
    """The anchor's call inside another call."""
    anchor = code.anchor
    if not isinstance(anchor, ast.Assign | ast.Expr):
        return None
    outer = rng.choice(
        ["_mutant(", "_mutant.wrap(", "_mutant(topk_ids, ", "list(", "tuple(", "_mutant(topk_ids=topk_ids, out="]
    )
    return _around(code, anchor.value, outer, ")")


def _around(code: Code, node: ast.expr, before: str, after: str) -> str:
    lines = [line.encode() for line in code.lines]
    end = (node.end_lineno or 0) - 1
    column = node.end_col_offset or 0
    lines[end] = lines[end][:column] + after.encode() + lines[end][column:]
    start = node.lineno - 1
    lines[start] = lines[start][: node.col_offset] + before.encode() + lines[start][node.col_offset :]
    return b"\n".join(lines).decode()


def _shared_line(rng: random.Random, code: Code) -> str | None:
    """Another statement on the anchor's line, behind it or in front of it."""
    anchor = code.anchor
    if not isinstance(anchor, ast.Assign | ast.Expr):
        return None
    other = f"{_fresh(rng)} = 1"
    if rng.random() < 0.5:
        return _around(code, anchor.value, "", f"; {other}")
    line = anchor.lineno - 1
    text, at = code.lines[line].encode(), anchor.col_offset
    return code.replaced(range(line, line + 1), [b"".join((text[:at], other.encode(), b"; ", text[at:])).decode()])


def _other_argument(rng: random.Random, code: Code) -> str | None:
    """The anchor's call gets other ids."""
    call = getattr(code.anchor, "value", None)
    if not isinstance(call, ast.Call):
        return None
    values = [k.value for k in call.keywords if k.arg == "topk_ids"] or call.args
    if not values or ast.unparse(values[0]) != "topk_ids":
        return None
    return _around(code, values[0], *rng.choice([("_mutant_", ""), ("", "[:1]"), ("", ".clone()"), ("_mutant(", ")")]))


def _early_return(rng: random.Random, code: Code) -> str | None:
    """A way out of the function above the anchor."""
    if rng.random() < 0.5:
        node = _above(rng, code)
    else:
        node = rng.choice([n for n in code.boundaries(code.function) if n.lineno <= code.anchor.lineno])
    indent = code.indent(node)
    head = rng.choice([f"if {_FLAG}:", f"while {_FLAG}:", f"with {_FLAG}:", f"for _ in {_FLAG}:"])
    return code.inserted(first_line(node) - 1, [f"{indent}{head}", f"{indent}{code.step}return None"])


def _unbinding(rng: random.Random, code: Code) -> str | None:
    """One of the three names may be gone when the anchor is reached."""
    name = rng.choice(["topk_ids", "topk_weights", "router_logits"])
    indent = code.indent(code.anchor)
    lines = rng.choice(
        [
            [f"if {_FLAG}:", f"{code.step}del {name}"],
            ["try:", f"{code.step}{_FLAG}()", f"except Exception as {name}:", f"{code.step}pass"],
            [f"for _ in {_FLAG}:", f"{code.step}del {name}"],
        ]
    )
    return code.inserted(code.span(code.anchor).start, [indent + line for line in lines])


def _has_a_twin(code: Code) -> bool:
    """Whether another function of the name stands at module level: it would rightly be taken for a tagged one gone."""
    return any(isinstance(n, ast.FunctionDef) and n.name == NAME and n is not code.function for n in code.tree.body)


def _renamed_function(rng: random.Random, code: Code) -> str | None:
    if _has_a_twin(code):
        return None
    line = code.function_line - 1
    new = rng.choice(["select_expert", "select_experts_v2", "_select_experts", "Select_experts"])
    return code.replaced(range(line, line + 1), [code.lines[line].replace(f"def {NAME}", f"def {new}")])


def _under(*heads: str) -> Callable[[random.Random, Code], str | None]:
    """The function moved under something."""

    def change(rng: random.Random, code: Code) -> str | None:
        if _has_a_twin(code):
            return None
        span = code.span(code.function)
        body = [code.step + line if line else line for line in code.lines[span.start : span.stop]]
        return code.replaced(span, [rng.choice(heads), *body])

    return change


def _defined_twice(rng: random.Random, code: Code) -> str | None:
    lines = code.of(code.function)
    at = rng.choice([first_line(code.function) - 1, len(code.lines)])
    if rng.random() < 0.5:
        lines = [f"if {_FLAG}:", *(code.step + line if line else line for line in lines)]
    return code.inserted(at, [*lines, "", ""])


REBINDINGS = (
    f"{NAME} = _mutant({NAME})",
    f"from _mutant import {NAME}",
    f"from _mutant import other as {NAME}",
    f"{NAME}: object = _mutant",
    f"if {_FLAG}:\n    {NAME} = _mutant",
    f"try:\n    {NAME} = _mutant\nexcept ImportError:\n    pass",
    f"_mutant_1 = {NAME} = _mutant",
    f"class {NAME}:\n    pass",
)
RARE_REBINDINGS = (
    f"import _mutant as {NAME}",
    f"_mutant_1, {NAME} = _mutant",
    f"[_mutant_1, ({NAME}, *_mutant_2)] = _mutant",
    f"for {NAME} in _mutant:\n    pass",
    f"with _mutant as {NAME}:\n    pass",
    f"({NAME} := _mutant)",
    f"del {NAME}",
    f"def _mutant_1():\n    global {NAME}\n    {NAME} = _mutant",
)


def _rebound(rng: random.Random, code: Code) -> str | None:
    return code.text + "\n\n" + rng.choice(REBINDINGS) + "\n"


def _coroutine(_: random.Random, code: Code) -> str | None:
    line = code.function_line - 1
    return code.replaced(range(line, line + 1), [code.lines[line].replace("def ", "async def ", 1)])


def _deleted(rng: random.Random, code: Code) -> str | None:
    """A statement of the function is gone, but not the anchor."""
    simple = [
        n for n in code.boundaries(code.function) if isinstance(n, ast.Assign | ast.Expr | ast.Assert | ast.AugAssign)
    ]
    return code.replaced(code.span(rng.choice([n for n in simple if n is not code.anchor])), [])


def _deleted_elsewhere(rng: random.Random, code: Code) -> str | None:
    """A whole statement of the module is gone, but not the function."""
    others = [n for n in code.tree.body if n is not code.function and getattr(n, "module", "") != "__future__"]
    return code.replaced(code.span(rng.choice(others)), [])


def _other_callee(rng: random.Random, code: Code) -> str | None:
    """The anchor calls something of another name: not what any release calls there."""
    span = code.span(code.anchor)
    lines = "\n".join(code.lines[span.start : span.stop])
    for name in CALLS:
        lines = lines.replace(f"{name}(", f"{name}_{rng.randrange(99)}(")
    return code.replaced(span, lines.split("\n"))


MUTATIONS = (
    Mutation("blank lines", FOUND, _lines_before(_blank)),
    Mutation("comments", FOUND, _lines_before(_comment)),
    Mutation("statements", FOUND, _lines_before(_statement)),
    Mutation("licence header", FOUND, _licence),
    Mutation("docstring", FOUND, _docstring),
    Mutation("reformatted", FOUND, _reformatted, undoes=True),
    Mutation("functions reordered", FOUND, _reordered),
    Mutation("other local renamed", FOUND, _other_local),
    Mutation("one more parameter", FOUND, _parameter),
    Mutation("one more branch", FOUND, _branch("topk_weights, topk_ids = _mutant(router_logits)")),
    Mutation("one more branch that raises", FOUND, _branch("raise ValueError(router_logits)")),
    Mutation("anchor copied into another function", FOUND, _copy_elsewhere),
    Mutation("function copied under another name", FOUND, _whole_copy),
    Mutation("method or inner function of the same name", FOUND, _namesake),
    Mutation("something else deleted", FOUND, _deleted_elsewhere, undoes=True),
    Mutation("statement deleted", EITHER, _deleted, undoes=True),
    Mutation("branch that binds nothing", REFUSED, _branch("pass")),
    Mutation("branch that binds the ids only", REFUSED, _branch("topk_ids = _mutant(router_logits)")),
    Mutation("ids renamed", REFUSED, _renaming("topk_ids")),
    Mutation("weights renamed", REFUSED, _renaming("topk_weights")),
    Mutation("logits renamed", REFUSED, _renaming("router_logits")),
    Mutation("decorator", REFUSED, _decorated),
    Mutation("anchor twice", REFUSED, _twice),
    Mutation("anchor twice, nested", REFUSED, _twice_nested),
    Mutation("anchor into if", REFUSED, _into(f"if {_FLAG}:")),
    Mutation("anchor into else", REFUSED, _into(f"if {_FLAG}:\n        pass\n    else:")),
    Mutation("anchor into try", REFUSED, _into("try:", "finally:", "    pass")),
    Mutation("anchor into with", REFUSED, _into(f"with {_FLAG}:")),
    Mutation("anchor into for", REFUSED, _into(f"for _ in {_FLAG}:")),
    Mutation("anchor into while", REFUSED, _into(f"while {_FLAG}:")),
    Mutation("anchor into an inner function", REFUSED, _into("def _mutant_inner():")),
    Mutation("anchor wrapped", REFUSED, _wrapped),
    Mutation("anchor shares its line", REFUSED, _shared_line),
    Mutation("anchor with other ids", REFUSED, _other_argument),
    Mutation("early return", REFUSED, _early_return),
    Mutation("name unbound", REFUSED, _unbinding),
    Mutation("function renamed", REFUSED, _renamed_function),
    Mutation("function into a class", REFUSED, _under("class _Mutant:", "class Mutant(object):")),
    Mutation("function into a block", REFUSED, _under(f"if {_FLAG}:", f"with {_FLAG}:", f"for _ in {_FLAG}:")),
    Mutation("function into a function", REFUSED, _under("def _mutant_outer():")),
    Mutation("function defined twice", REFUSED, _defined_twice),
    Mutation("function rebound", REFUSED, _rebound),
    Mutation("coroutine", REFUSED, _coroutine),
)
# Where the post-processing bears another name and a later anchor is still there, the ids at that are physical already.
OTHER_CALLEE = Mutation("anchor calls another name", REFUSED, _other_callee)


def _latin_1(_: random.Random, text: str) -> bytes | None:
    return f"# -*- coding: latin-1 -*-\n# \u00e9\n{text}".encode("latin-1") if text.isascii() else None


def _mixed(rng: random.Random, text: str) -> bytes:
    return "".join(line + rng.choice(["\n", "\r\n"]) for line in text.split("\n")[:-1]).encode()


def _tabs(_: random.Random, text: str) -> bytes | None:
    lines = text.split("\n")
    deep = [len(line) - len(line.lstrip(" ")) for line in lines]
    # Only where every indentation is whole levels; inside brackets and strings a remainder of blanks does no harm.
    changed = "\n".join("\t" * (d // 4) + " " * (d % 4) + line[d:] for d, line in zip(deep, lines, strict=True))
    return changed.encode() if changed != text else None


ENCODINGS = (
    Encoding("CRLF", lambda _, text: text.replace("\n", "\r\n").encode()),
    Encoding("CR", lambda _, text: text.replace("\n", "\r").encode()),
    Encoding("mixed line ends", _mixed),
    Encoding("byte order mark", lambda _, text: codecs.BOM_UTF8 + text.encode()),
    Encoding("byte order mark and CRLF", lambda _, text: codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode()),
    Encoding("latin-1", _latin_1),
    Encoding("tabs", _tabs),
    Encoding("no end of the last line", lambda _, text: text.rstrip().encode()),
)
