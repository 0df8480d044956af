"""The house is built as planned: who may import whom, where the agent must run, and how long a file may be."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

TOP = Path(__file__).resolve().parent.parent
FILES = sorted((TOP / "surgeon").rglob("*.py"))
AGENT = sorted((TOP / "surgeon" / "node" / "agent").glob("*.py"))

# What each room may import besides itself. cli -> operations -> the rooms of one subject each -> node; surgery and
# environment are pure. Types count as well: a room that names another's types depends on it.
SUBJECTS = {"surgery", "environment", "server", "bench", "ledger"}
MAY = {
    "cli": {"operations", "node", "lab", "config", "patches", "errors", *SUBJECTS},
    "operations": {"node", "patches", "registry", "errors", *SUBJECTS},
    "surgery": {"errors"},
    "environment": {"errors"},
    "server": {"node", "errors"},
    "bench": {"node", "errors"},
    "ledger": {"node", "errors"},
    "node": {"errors"},
    "registry": {"cache", "errors"},
    "cache": set(),
    "lab": {"node", "registry", "cache", "errors", *SUBJECTS},
    "config": {"node", "lab", "errors"},
    "patches": {"errors"},
    "errors": set(),
}


class Import(NamedTuple):
    """One import of our own: from which room (a folder or a file of surgeon/) into which, and where it stands."""

    source: str
    target: str
    where: str


def modules_of(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, absolutely named, with the line; those under TYPE_CHECKING too."""
    package = path.relative_to(TOP).parent.parts
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from surgeon import config` names a module in what looks like an attribute.
            found += [(f"{name}.{alias.name}", node.lineno) for alias in node.names]
    return found


def room(path: Path) -> str:
    """The room that a file of surgeon/ belongs to."""
    first = path.relative_to(TOP / "surgeon").parts[0]
    return first.removesuffix(".py")


@functools.cache
def own_imports() -> list[Import]:
    """Every import of surgeon's own modules that crosses from one room to another."""
    rooms = {room(path) for path in FILES}
    crossing = []
    for path in FILES:
        for name, line in modules_of(path):
            parts = name.split(".")
            if parts[0] == "surgeon" and len(parts) > 1 and parts[1] in rooms and parts[1] != room(path):
                crossing.append(Import(room(path), parts[1], f"{path.relative_to(TOP)}:{line}"))
    return crossing


def test_every_room_is_in_the_plan() -> None:
    """A new folder or module of surgeon/ first gets its place in the plan."""
    assert {room(path) for path in FILES} - {"__init__", "__main__"} == set(MAY)


def test_arrows_point_down_only() -> None:
    """Cli -> operations -> surgery, environment, server, bench, ledger -> node, and nothing else."""
    wrong = [one for one in own_imports() if one.target not in MAY.get(one.source, set(MAY))]
    assert wrong == []


def test_the_imports_are_really_seen() -> None:
    """The rules above judge what is there: lazy imports inside functions, relative ones and those for types."""
    seen = {(one.source, one.target) for one in own_imports()}
    assert {("cli", "operations"), ("operations", "surgery"), ("operations", "node"), ("config", "node")} <= seen
    relative = {name for name, _ in modules_of(TOP / "surgeon" / "node" / "agent" / "run.py")}
    assert {"surgeon.node.agent.processes", "surgeon.node.agent.protocol.verb"} <= relative


def test_nobody_imports_the_command_line() -> None:
    """The cli is where a process begins; only the two entry points name it."""
    assert {one.where.partition(":")[0] for one in own_imports() if one.target == "cli"} <= {"surgeon/__main__.py"}


def test_nobody_imports_what_is_shipped() -> None:
    """patches/ runs elsewhere: it is read as bytes, never imported."""
    wrong = [
        f"{path.relative_to(TOP)}:{line}"
        for path in FILES
        for name, line in modules_of(path)
        if name.split(".")[0] == "patches" or name.startswith("surgeon._data")
    ]
    assert wrong == []


@pytest.mark.parametrize("path", AGENT, ids=lambda path: path.name)
def test_the_agent_parses_as_python_3_8(path: Path) -> None:
    """A node may have no newer python3 than Debian 11 or an old conda brings."""
    ast.parse(path.read_bytes(), feature_version=(3, 8))


@pytest.mark.parametrize("path", AGENT, ids=lambda path: path.name)
def test_the_agent_needs_nothing_but_itself_and_the_standard_library(path: Path) -> None:
    """Nothing is installed on a node; and the package is run under another name, so its own imports are relative."""
    found = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Import | ast.ImportFrom)]
    absolute = [alias.name for node in found if isinstance(node, ast.Import) for alias in node.names]
    absolute += [str(node.module) for node in found if isinstance(node, ast.ImportFrom) and not node.level]
    # The file that is sent holds the package under this name, and boot.py opens it.
    allowed = {*sys.stdlib_module_names, "surgeon_agent"}
    assert [name for name in absolute if name.split(".")[0] not in allowed] == []
    assert [node.lineno for node in found if isinstance(node, ast.ImportFrom) and node.level > 1] == []


LONG = 400


def test_a_long_file_says_why_it_is_long() -> None:
    """A file is a room: beyond 400 lines its docstring says why it is not two."""
    silent = []
    for path in sorted(p for folder in ("surgeon", "patches", "tests") for p in (TOP / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        said = ast.get_docstring(ast.parse(source)) or ""
        if len(source.splitlines()) > LONG and not re.search(r"\blong\b|400 lines|one file", said, re.IGNORECASE):
            silent.append(f"{path.relative_to(TOP)}: {len(source.splitlines())} lines")
    assert silent == []


def test_every_module_says_what_it_is() -> None:
    """Each file under surgeon/ begins with a docstring."""
    assert [str(p.relative_to(TOP)) for p in FILES if not ast.get_docstring(ast.parse(p.read_bytes()))] == []
