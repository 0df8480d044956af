"""The write is refused or breaks off: a read-only package, another's lease, an agent that dies halfway."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surgeon.node.agent.state import site_id
from tests.support.local_node import local_node

if TYPE_CHECKING:
    from tests.support.bed import Bed

BOB = {"owner": "bob", "host": "his-laptop", "pid": 7, "ttl_s": 120}
UNSHARED = ("unshare", "--mount", "sh", "-c")


def read_only(bed: Bed) -> None:
    """Make the package's folder one that the node's user cannot write: by its mode, and for root by a mount."""
    folder = bed.moe
    if os.geteuid() != 0:
        folder.chmod(0o555)
        return
    if subprocess.run([*UNSHARED, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("root writes anywhere, and may not mount here")
    script = bed.root / "read-only"
    mount = f'mount --bind "{folder}" "{folder}" && mount -o remount,ro,bind "{folder}" && exec python3 "$@"'
    script.write_text(f"#!/bin/sh\nexec unshare --mount sh -c '{mount}' sh \"$@\"\n", encoding="utf-8")
    script.chmod(0o755)
    bed.configure(node_python=str(script))


def take_lease(bed: Bed, *, host: str = "laptop-of-ann", pid: int = 4711) -> None:
    """Have another surgeon hold the lease, from another machine."""
    holder = {"owner": "ann", "host": host, "pid": pid, "ttl_s": 120}
    with local_node(bed.ssh.state_dir) as node:
        node.call("lease", {"site_id": site_id(str(bed.fake.site)), "action": "acquire", **holder})


@pytest.fixture
def patched(bed: Bed) -> Bed:
    """A node where k0 = 4 is written; nothing serves, so that a change needs no restart."""
    assert bed.apply("--k0", "4").code == 0
    return bed


def test_a_read_only_package_is_refused_before_anything_is_written(bed: Bed) -> None:
    """Exit 4: whose folder it is and why it cannot be written; no revision is begun."""
    read_only(bed)
    before = bed.facts()
    answer = bed.apply()
    assert answer.code == 4
    assert "topk.py cannot be replaced: " in answer.stderr
    assert str(bed.moe) in answer.stderr
    assert "make its folder writable" in answer.stderr
    assert bed.facts() == before


def test_a_lease_that_another_holds_keeps_everybody_else_out(serving: Bed) -> None:
    """Exit 7 with who, from where, and for how long; and how to take it. Looking is always allowed."""
    take_lease(serving)
    before = serving.facts()
    for answer in (serving.apply(), serving.restart()):
        assert answer.code == 7
        assert "locked by ann on laptop-of-ann (pid 4711) for up to 1" in answer.stderr
        assert "--break-lock" in answer.stderr
    assert serving.facts() == before
    assert serving.status()["lease"] == "ann on laptop-of-ann (pid 4711)"


def test_a_lease_can_be_broken_and_it_is_said_whose(bed: Bed) -> None:
    """The one who breaks it answers for it; the change goes through."""
    take_lease(bed)
    answer = bed.apply("--break-lock")
    assert answer.code == 0
    assert "breaking the lease of ann on laptop-of-ann (pid 4711)" in answer.stderr
    assert bed.is_patched()


def test_a_lease_that_is_broken_meanwhile_stops_its_holder(bed: Bed) -> None:
    """Exit 7 for the one whose lease it was: what it began is now for the other to finish or undo."""
    bed.break_at("commit", do=["wait"], wait_s=3.0)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(bed.apply)
        bed.await_break()
        with local_node(bed.ssh.state_dir) as node:
            node.call("lease", {"site_id": site_id(str(bed.fake.site)), "action": "break", **BOB})
        answer = first.result(60)
    assert answer.code == 7
    assert "bob on his-laptop (pid 7) holds" in answer.stderr
    assert bed.is_original()


def test_a_lease_of_a_surgeon_that_died_on_this_machine_is_no_obstacle(bed: Bed) -> None:
    """Whoever pressed Ctrl-C twice does not wait three minutes for a process that is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    take_lease(bed, host=os.uname().nodename, pid=gone.pid)
    assert bed.apply().code == 0
    assert bed.is_patched()


def test_a_write_that_the_interpreter_cannot_compile_is_taken_back(bed: Bed) -> None:
    """The server's own Python has the last word on the staged files: exit 4, and nothing is left beside topk.py."""
    real = bed.fake.python.resolve()
    bed.fake.python.unlink()
    picky = 'case "$*" in *"compile(file.read()"*) echo "SyntaxError: too new" >&2; exit 1;; esac'
    bed.fake.python.write_text(f'#!/bin/bash\n{picky}\nexec -a "$0" "{real}" "$@"\n', encoding="utf-8")
    bed.fake.python.chmod(0o755)
    before = bed.files()
    answer = bed.apply()
    assert answer.code == 4
    assert "cannot compile what would be written: SyntaxError: too new" in answer.stderr
    assert bed.files() == before
    assert bed.revisions() == [("apply", "failed")]


@pytest.mark.parametrize(
    ("moment", "outcome"),
    [
        ("first-rename", "had been cut short before anything was written; closed"),
        ("second-rename", "had been cut short; undone, the bytes from before are back"),
    ],
)
def test_a_write_whose_agent_is_killed_is_undone_by_the_next_command(bed: Bed, moment: str, outcome: str) -> None:
    """Killed for memory, say: staged files are swept away, and a runtime without its caller is taken out again."""
    bed.break_at("commit", moment, do=["die"])
    answer = bed.apply()
    assert bed.broke
    assert answer.code == 3
    assert "ended without an answer" in answer.stderr
    assert "a revision may be pending; the next apply, rollback or restart finishes or undoes it" in answer.stderr
    assert bed.fake.topk.read_bytes() == bed.original, "topk.py is the last that is renamed"
    assert "revision 1 (apply) was begun and never closed" in bed.status()["unfinished"]
    answer = bed.rollback()
    assert answer.code == 0, answer
    assert f"revision 1 {outcome}" in answer.stderr
    assert bed.is_original()


def test_a_rollback_whose_agent_is_killed_between_two_files_is_finished(patched: Bed) -> None:
    """topk.py is the original again and the runtime still lies there: what was begun is done, not reported as done."""
    patched.break_at("restore", "unlink", do=["die"])
    answer = patched.rollback()
    assert patched.broke
    assert answer.code == 3
    assert patched.fake.topk.read_bytes() == patched.original
    assert not patched.is_original()
    answer = patched.rollback()
    assert answer.code == 0, answer
    assert "revision 2, a rollback, had been cut short; finished" in answer.stderr
    assert patched.is_original()
    assert not [path for path in Path(patched.moe).iterdir() if "surgeon-" in path.name]
