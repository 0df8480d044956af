"""The README's tables say what is there: every command that exists, no other, and the exit codes of errors.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from surgeon import errors
from surgeon.cli.app import app
from surgeon.cli.group import INTERRUPTED
from surgeon.errors import SurgeonError

README = Path(__file__).resolve().parent.parent.parent / "README.md"


def rows(text: str, *header: str) -> list[list[str]]:
    """The cells of the one Markdown table with that header.

    Args:
        text: Markdown.
        header: the names of its columns.
    """
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    starts = [number for number, cells in enumerate(lines) if cells == list(header)]
    assert len(starts) == 1, f"expected one table | {' | '.join(header)} |, found {len(starts)}"
    found = []
    for cells in lines[starts[0] + 2 :]:
        if len(cells) != len(header):
            break
        found.append(cells)
    return found


def named(cell: str) -> list[str]:
    """The commands that a cell names: "`surgeon lab up`, `down`" is lab up and lab down; arguments are left out."""
    paths: list[list[str]] = []
    for span in re.findall(r"`([^`]+)`", cell):
        words = []
        for word in span.split():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", word):
                break
            words.append(word)
        paths.append(words[1:] if words[:1] == ["surgeon"] else [*paths[-1][: -len(words)], *words])
    return [" ".join(path) for path in paths]


def existing(command: Any, prefix: str = "") -> set[str]:
    """Every command that --help shows, sub-commands by their whole path."""
    if not hasattr(command, "commands"):
        return set() if command.hidden else {prefix.strip()}
    return {path for name, one in command.commands.items() for path in existing(one, f"{prefix} {name}")}


def kinds() -> list[type[SurgeonError]]:
    """The kinds of error that errors.py has: the root and everything below it."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SurgeonError)]


def test_the_command_table_names_every_command_and_no_other() -> None:
    """A command that nobody can find is not there, and one that is only promised is worse."""
    documented = [
        name for cell, _ in rows(README.read_text("utf-8"), "command", "what it does") for name in named(cell)
    ]
    assert sorted(documented) == sorted(existing(get_command(app)))


def test_the_exit_code_table_is_that_of_the_errors() -> None:
    """Done, interrupted, and each code that an error class has; each with a meaning."""
    table = {int(code.strip("`")): meaning for code, meaning in rows(README.read_text("utf-8"), "code", "meaning")}
    assert set(table) == {0, INTERRUPTED, *(kind.exit_code for kind in kinds())}
    assert all(table.values())


def test_no_two_kinds_of_error_share_a_code() -> None:
    """A script can tell them apart: by the exit code, and by the word in --json."""
    found = kinds()
    assert len({kind.exit_code for kind in found}) == len({kind.code for kind in found}) == len(found)


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("`surgeon inspect topk`", ["inspect topk"]),
        ("`surgeon apply oea --k0 4`", ["apply oea"]),
        ("`surgeon rollback [REVISION]`", ["rollback"]),
        ("`surgeon status`, `history`, `diff`", ["status", "history", "diff"]),
        ("`surgeon lab up`, `status`, `down`", ["lab up", "lab status", "lab down"]),
        ("`surgeon bench smoke` and `surgeon logs`", ["bench smoke", "logs"]),
    ],
)
def test_a_cell_is_read_as_people_read_it(cell: str, names: list[str]) -> None:
    """A word alone stands for the last word of the command before it."""
    assert named(cell) == names
