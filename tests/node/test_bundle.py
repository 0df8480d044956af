"""The agent as one file: the same bytes every time, and runnable by every Python a node may have."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

import surgeon.node.agent
from surgeon.node.agent.__main__ import MODULES
from surgeon.node.agent.protocol import VERBS
from surgeon.node.bundle import bundle, command
from surgeon.node.client import unframe

AGENT = Path(surgeon.node.agent.__file__).parent
SOURCES = sorted(AGENT.glob("*.py"))


def test_the_same_sources_make_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    """A second process, another umask and other file times give the same hash."""
    code = "import os; os.umask(0o077); from surgeon.node.bundle import bundle; print(bundle().sha256)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)
    assert done.stdout.decode().strip() == bundle().sha256 == hashlib.sha256(bundle().data).hexdigest()


def test_the_file_holds_the_agents_sources_and_nothing_else() -> None:
    """Every module is packed as it stands, in order, with a fixed date."""
    with zipfile.ZipFile(BytesIO(bundle().data)) as archive:
        packed = {info.filename: archive.read(info) for info in archive.infolist()}
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert packed == {f"surgeon_agent/{path.name}": path.read_bytes() for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_module_parses_as_python_3_8(path: Path) -> None:
    """Nodes have Pythons down to 3.8."""
    ast.parse(path.read_bytes(), str(path), feature_version=(3, 8))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_module_needs_the_standard_library_only(path: Path) -> None:
    """Nothing is installed on a node for surgeon's sake."""
    for part in ast.walk(ast.parse(path.read_bytes())):
        names = [alias.name for alias in part.names] if isinstance(part, ast.Import) else []
        if isinstance(part, ast.ImportFrom) and part.level == 0:
            names = [part.module or ""]
        for name in names:
            top = name.partition(".")[0]
            assert top in sys.stdlib_module_names or top == "surgeon_agent", f"{path.name} imports {name}"


def test_the_table_of_verbs_is_what_the_modules_register() -> None:
    """Each verb is found in the module that the table names, and no module has a verb more."""
    for module in set(MODULES.values()):
        importlib.import_module(f"surgeon.node.agent.{module}")
    found = {verb: function.__module__.rpartition(".")[2] for verb, function in VERBS.items()}
    assert found == MODULES


def interpreters() -> list[str]:
    """Every Python 3.8 or later that is around, once each."""
    names = ["python3", *(f"python3.{minor}" for minor in range(8, 16))]
    places = [*(shutil.which(name) for name in names), shutil.which("python3", path="/usr/bin"), sys.executable]
    working = {}
    for place in filter(None, places):
        asked = [place, "-c", "import sys; print(sys.version_info >= (3, 8), sys.version)"]
        done = subprocess.run(asked, check=False, capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0 and done.stdout.startswith(b"True"):
            working[done.stdout] = place
    return list(working.values())


def test_every_python_around_runs_the_agent(tmp_path: Path) -> None:
    """The agent answers the same under each interpreter of this machine."""
    request = json.dumps({"verb": "read", "args": {"path": str(tmp_path)}}).encode()
    for number, interpreter in enumerate(interpreters()):
        stdin = b"%d %d\n" % (len(bundle().data), len(request)) + bundle().data + request
        argv = command((interpreter,), str(tmp_path / str(number)), "n")
        done = subprocess.run(argv, check=False, capture_output=True, input=stdin, timeout=60)
        answer = unframe(done.stdout, "n")
        assert answer is not None, (interpreter, done.stderr)
        assert answer["error"]["message"] == f"{tmp_path} is not a regular file."


def test_a_request_cut_short_is_not_carried_out(tmp_path: Path) -> None:
    """Half a request, or half an agent, does nothing at all."""
    request = json.dumps({"verb": "ledger", "args": {"site_id": "0" * 12}}).encode()
    whole = b"%d %d\n" % (len(bundle().data), len(request)) + bundle().data + request
    argv = command((sys.executable,), str(tmp_path / "state"), "n")
    for length in (0, 3, 1000, len(whole) - 1):
        done = subprocess.run(argv, check=False, capture_output=True, input=whole[:length], timeout=60)
        answer = unframe(done.stdout, "n")
        assert answer is not None
        assert "cut short" in answer["error"]["message"]
    assert not (tmp_path / "state").exists()
