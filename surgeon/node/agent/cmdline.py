"""Reads a Python command line: is it a launch of an sglang server, and what was asked for?"""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Optional, Sequence, Tuple

DEFAULT_PORT = 30000

_PYTHON = re.compile(r"^(python|pypy)[0-9.]*t?$")

# The interpreter's own options that take the next word.
_TAKES_A_WORD = {"-W", "-X", "--check-hash-based-pycs"}

_SERVING_MODULES = {"sglang.launch_server", "sglang.srt.entrypoints.http_server"}
_SUBCOMMAND_MODULES = {"sglang", "sglang.cli", "sglang.cli.main"}


class Program(NamedTuple):
    """What a Python command line runs.

    Attributes:
        options: the interpreter's own options, to be repeated for a question to the same interpreter.
        kind: ``module``, ``script`` or ``code``.
        target: the module's name, the script's path, or the code.
        args: the program's arguments.
    """

    options: Tuple[str, ...]
    kind: str
    target: str
    args: Tuple[str, ...]


def is_python(path: str) -> bool:
    """Tell whether a program of this name is a Python interpreter."""
    return bool(_PYTHON.match(os.path.basename(path)))


def program(argv: Sequence[str]) -> Optional[Program]:
    """Take a Python command line apart; None for the interactive interpreter."""
    words = list(argv[1:])
    options = []
    while words:
        word = words.pop(0)
        if word in _TAKES_A_WORD and words:
            options += [word, words.pop(0)]
            continue
        if not word.startswith("-") or word == "-":
            return Program(tuple(options), "script", word, tuple(words))
        flags, letter, rest = _flags(word)
        if letter:
            target = rest or (words.pop(0) if words else "")
            kind = "module" if letter == "m" else "code"
            return Program(tuple(options + flags), kind, target, tuple(words))
        options.append(word)
    return None


def _flags(word: str) -> Tuple[list, str, str]:  # type: ignore[type-arg] # Python 3.8 has no list[str]
    """Split ``-um`` into ``-u`` and ``m``: the options before ``-m`` or ``-c``, the letter, what is glued to it."""
    if word.startswith("--"):
        return [], "", ""
    for place, letter in enumerate(word[1:], start=1):
        if letter in "mc":
            return (["-" + word[1:place]] if place > 1 else []), letter, word[place + 1 :]
        if letter in "WX":
            break
    return [], "", ""


def serving(what: Program) -> bool:
    """Tell whether this program is the launcher of an sglang server."""
    if what.kind == "module":
        return what.target in _SERVING_MODULES or (what.target in _SUBCOMMAND_MODULES and what.args[:1] == ("serve",))
    if what.kind == "script":
        name = os.path.basename(what.target)
        if name == "sglang":
            return what.args[:1] == ("serve",)
        return name == "launch_server.py" and (
            "sglang" in what.target or option(what.args, "--model-path", "--model") is not None
        )
    return False


def option(args: Sequence[str], *names: str) -> Optional[str]:
    """Return the value of the last of these options, in ``--name value`` or ``--name=value``."""
    found = None
    for place, word in enumerate(args):
        name, separator, value = word.partition("=")
        if name in names:
            if separator:
                found = value
            elif place + 1 < len(args):
                found = args[place + 1]
    return found


def port(args: Sequence[str]) -> int:
    """Return the port that was asked for; sglang's default is 30000."""
    asked = option(args, "--port")
    return int(asked) if asked is not None and asked.isdigit() else DEFAULT_PORT
