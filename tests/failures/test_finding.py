"""What is to be cut cannot be found: no sglang, two of them, no server, the wrong port."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.servers import FakeServer, free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.bed import Bed


@pytest.fixture
def alone(bed: Bed) -> Bed:
    """A node that sees no process but its own, and no interpreter but the ones that a test puts there."""
    script = bed.root / "alone"
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3"
    command = f'exec "{python}" "$@"'
    # Other servers may run on this machine; a process namespace of its own hides them, where that is allowed.
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode == 0:
        command = f'exec {" ".join(unshare)} "{python}" "$@"'
    script.write_text(f'#!/bin/sh\nexport HOME="{bed.ssh.home}" PATH=/usr/bin:/bin\n{command}\n', encoding="utf-8")
    script.chmod(0o755)
    bed.configure(node_python=str(script), python=None, port=None)
    return bed


def environment(home: Path, name: str) -> Path:
    """Put an sglang into a virtual environment where people have theirs; return its interpreter."""
    made = FakeServer.install(home / f"of-{name}")
    (home / name).symlink_to(made.root / "venv")
    return home / name / "bin" / "python"


def test_no_sglang_says_where_it_looked_and_how_to_name_an_interpreter(alone: Bed) -> None:
    """No server runs and no interpreter has it: exit 4, with an example of the option that helps."""
    answer = alone.apply()
    assert answer.code == 4
    assert "no sglang was found: no server is running, and no interpreter that was looked at has it" in answer.stderr
    assert "--python PATH (for example /opt/venv/bin/python)" in answer.stderr


def test_a_python_that_is_named_and_has_no_sglang_is_the_one_in_the_message(alone: Bed) -> None:
    """Whoever names an interpreter is told about that one."""
    answer = alone.apply("--python", "/usr/bin/python3")
    assert answer.code == 4
    assert "/usr/bin/python3 has no sglang" in answer.stderr
    answer = alone.apply("--python", "/nowhere/bin/python")
    assert answer.code == 4
    assert "Expected /nowhere/bin/python to say where sglang is" in answer.stderr


def test_two_installations_are_both_listed_and_one_can_be_chosen(alone: Bed) -> None:
    """Guessing would patch the one that does not run; the message lists them with their interpreters."""
    first, second = environment(alone.ssh.home, "venv"), environment(alone.ssh.home, ".venv")
    answer = alone.apply()
    assert answer.code == 4
    assert "2 sglang installations were found and no running server tells which one counts" in answer.stderr
    assert str(first) in answer.stderr
    assert str(second) in answer.stderr
    assert "say which with --python PATH" in answer.stderr
    chosen = alone.surgeon("inspect", "topk", "--json", "--python", str(second))
    assert chosen.code == 0
    assert os.path.realpath(chosen.result["path"]).startswith(os.path.realpath(second.parents[1]) + os.sep)


def test_without_a_server_an_apply_writes_and_says_that_k_could_not_be_checked(bed: Bed) -> None:
    """Nothing runs, so nothing is restarted: the patch waits for the next start."""
    answer = bed.apply()
    assert answer.code == 0
    assert "k is unknown (no model is served)" in answer.stderr
    assert "written, not live: revision 1" in answer.stdout
    assert bed.is_patched()


def test_a_restart_without_a_server_refuses_to_invent_a_launch_line(bed: Bed) -> None:
    """Nothing runs and nothing is saved: exit 4, and still nothing runs."""
    answer = bed.restart()
    assert answer.code == 4
    assert f"no sglang server for port {bed.fake.port} is running" in answer.stderr
    assert "surgeon restarts servers that run" in answer.stderr
    assert bed.fake.pids() == []


def test_the_logs_of_no_server_are_refused(bed: Bed) -> None:
    """There is no file to read from."""
    answer = bed.surgeon("logs")
    assert answer.code == 4
    assert f"no sglang server for port {bed.fake.port} is running" in answer.stderr


def test_a_port_where_no_server_is_lists_those_that_are(serving: Bed) -> None:
    """A slip in the port must not fall back to another server, nor to some interpreter."""
    port = free_port()
    serving.configure(python=None, port=port)
    before = serving.facts()
    answer = serving.apply()
    assert answer.code == 2
    assert f"no sglang server is running for port {port}; expected one of the ports that are: " in answer.stderr
    assert str(serving.fake.port) in answer.stderr
    assert serving.facts() == before
