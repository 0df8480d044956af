"""Files of a package are replaced all or none, and come back byte for byte.

Long because every step of the one transaction is broken here, in every way, against the same installation.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.node.agent import files, ledger, transaction
from surgeon.node.agent.protocol import AgentError, DeadlineError
from tests.support.installation import ORIGINAL, PATCHED, RUNTIME, Installation, sha

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def package(tmp_path: Path) -> Installation:
    """A small package and the lease on it."""
    found = Installation.make(tmp_path)
    found.acquire()
    return found


def test_a_commit_writes_new_bytes_with_the_old_mode_and_a_new_time(package: Installation) -> None:
    """Mode and owner are kept, the time is not, and nothing is left beside the files."""
    before = package.topk.stat()
    result = package.commit()
    after = package.topk.stat()
    assert package.topk.read_bytes() == PATCHED
    assert package.runtime.read_bytes() == RUNTIME
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert package.runtime.stat().st_mode == before.st_mode
    assert int(after.st_mtime) != int(before.st_mtime)
    assert package.names() == {"__init__.py", "topk.py", "_runtime.py", "__pycache__"}
    assert result["revision"] == 1
    assert [(file["before"], file["after"]) for file in result["files"]] == [
        (None, sha(RUNTIME)),
        (sha(ORIGINAL), sha(PATCHED)),
    ]
    assert result["files"][1]["nlink"] == 2


def test_a_hard_link_in_another_environment_is_left_alone(package: Installation) -> None:
    """Site-packages are linked to the cache by uv; a patch does not leak through the link."""
    package.commit()
    assert package.cached.read_bytes() == ORIGINAL
    assert package.topk.stat().st_nlink == package.cached.stat().st_nlink == 1


def test_a_fresh_interpreter_runs_what_was_written(package: Installation) -> None:
    """Stale bytecode of the same size, and bytecode that is never checked, is not run; not after undoing either."""
    assert len(PATCHED) == len(ORIGINAL)
    assert package.imported() == "original"
    stale = package.bytecode()
    package.commit()
    assert not any(path.exists() for path in stale)
    assert (package.package / "__pycache__" / "topk_other.cpython-311.pyc").exists()
    assert package.imported() == "patched!"
    package.restore()
    assert package.imported() == "original"


def test_bytecode_kept_elsewhere_is_outdated_too(package: Installation) -> None:
    """The whole second of the file's time differs from the old one's, which is all that bytecode is told apart by."""
    now = time.time()
    for second in range(int(now) - 1, int(now) + 4):
        os.utime(package.topk, (second, second))
        before = int(package.topk.stat().st_mtime)
        package.commit()
        assert int(package.topk.stat().st_mtime) != before
        package.restore(package.records()[-1]["revision"])


def test_a_restore_brings_back_bytes_mode_and_owner(package: Installation) -> None:
    """What the ledger recorded of the original is what is there again; the added file is gone."""
    if os.geteuid() == 0:
        os.chown(package.topk, 1234, 4321)
    before = package.topk.stat()
    package.commit()
    package.topk.chmod(0o600)
    package.restore()
    after = package.topk.stat()
    assert package.is_original()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_revisions_stay_pending_until_they_are_finished(package: Installation) -> None:
    """The ledger has who, what and with which files; a finish closes it with the gates."""
    package.commit()
    (pending,) = package.records()
    assert (pending["status"], pending["kind"], pending["patch"]) == ("pending", "apply", "oea")
    assert pending["holder"] == {"owner": "me", "host": "here", "pid": 1}
    package.call("finish", revision=1, status="applied", gates=[{"name": "alive", "passed": True}])
    package.restore()
    package.call("finish", revision=2, status="applied")
    package.call("finish", revision=1, status="rolled-back")
    first, second = package.records()
    assert (first["status"], first["gates"]) == ("rolled-back", [{"name": "alive", "passed": True}])
    assert (second["status"], second["of"], second["kind"]) == ("applied", 1, "rollback")
    lines, torn = ledger.read_lines(str(package.folder))
    assert [line["revision"] for line in lines] == [1, 1, 2, 2, 1]
    assert torn == []


def test_a_finish_of_what_is_not_there_is_refused(package: Installation) -> None:
    """Neither an unknown revision nor an unknown status is written down."""
    with pytest.raises(AgentError, match="no revision 7"):
        package.call("finish", revision=7, status="applied")
    package.commit()
    with pytest.raises(AgentError, match="not 'done'"):
        package.call("finish", revision=1, status="done")
    assert [record["status"] for record in package.records()] == ["pending"]


def test_somebody_elses_edit_stops_a_commit_before_anything_is_touched(package: Installation) -> None:
    """One file that is not as expected stops all of them."""
    edited = ORIGINAL + b"# mine\n"
    package.topk.write_bytes(edited)
    with pytest.raises(AgentError, match="Somebody else changed") as raised:
        package.commit()
    assert (raised.value.code, raised.value.where) == ("foreign-edit", str(package.topk))
    assert package.topk.read_bytes() == edited
    assert not package.runtime.exists()
    assert package.records() == []


def test_a_file_that_should_not_be_there_stops_a_commit(package: Installation) -> None:
    """A new file does not take the place of one that somebody has put there."""
    package.runtime.write_bytes(b"theirs = 1\n")
    with pytest.raises(AgentError, match="expected no file"):
        package.commit()
    assert package.runtime.read_bytes() == b"theirs = 1\n"


def test_somebody_elses_edit_stops_a_restore(package: Installation) -> None:
    """An original is never put over bytes that the ledger does not know, such as a newer installation."""
    package.commit()
    package.topk.write_bytes(b"newer = 2\n")
    with pytest.raises(AgentError, match="Somebody else changed"):
        package.restore()
    assert package.topk.read_bytes() == b"newer = 2\n"
    assert package.runtime.read_bytes() == RUNTIME


def test_a_damaged_object_stops_a_restore(package: Installation) -> None:
    """Recorded bytes that no longer have their hash are not written anywhere."""
    package.commit()
    (package.folder / "objects" / sha(ORIGINAL)).write_bytes(b"damaged")
    with pytest.raises(AgentError, match="damaged"):
        package.restore()
    assert package.topk.read_bytes() == PATCHED


def test_a_link_is_not_written_through(package: Installation) -> None:
    """A module that is a symbolic link is refused, with where it leads."""
    package.topk.rename(package.root / "elsewhere.py")
    package.topk.symlink_to(package.root / "elsewhere.py")
    with pytest.raises(AgentError, match=r"symbolic link to .*elsewhere"):
        package.commit()
    assert (package.root / "elsewhere.py").read_bytes() == ORIGINAL


def test_bytes_that_do_not_compile_are_never_put_in_place(package: Installation) -> None:
    """The server's own interpreter has the word, before anything is renamed."""
    args = package.commit_args()
    args["files"][1]["b64"] = base64.b64encode(b"def topk(:\n").decode()
    with pytest.raises(AgentError, match="SyntaxError") as raised:
        package.call("commit", **args)
    assert raised.value.code == "does-not-fit"
    assert package.is_original()
    assert [record["status"] for record in package.records()] == ["failed"]


def test_nothing_is_left_of_compiling(package: Installation) -> None:
    """Byte-compiling writes no bytecode, whatever the environment says about it."""
    for path in package.bytecode():
        path.unlink()
    before = sorted(path.name for path in (package.package / "__pycache__").iterdir())
    package.commit()
    assert sorted(path.name for path in (package.package / "__pycache__").iterdir()) == before


def test_a_read_only_mount_is_said_to_be_one(package: Installation) -> None:
    """A package that cannot be written is refused as not fitting, before the ledger says a word."""
    with read_only(package.package), pytest.raises(AgentError, match="read-only") as raised:
        package.commit()
    assert raised.value.code == "does-not-fit"
    assert package.is_original()
    assert package.records() == []


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only, for root by a mount, for others by its mode."""
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    mount = subprocess.run(["/bin/mount", "--bind", str(folder), str(folder)], check=False, capture_output=True)
    if mount.returncode != 0:
        pytest.skip("this machine does not let root mount")
    try:
        remount = ["/bin/mount", "-o", "remount,ro,bind", str(folder), str(folder)]
        subprocess.run(remount, check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["/bin/umount", str(folder)], check=True, capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_owner_that_cannot_be_kept_is_a_refusal(package: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user, in a folder that we may write, would change hands: refused."""
    os.chown(package.topk, 1234, 4321)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(AgentError, match="cannot keep it so") as raised:
        package.commit()
    assert raised.value.code == "does-not-fit"
    assert package.is_original()


# Each fault: which call, at which of its uses, fails with what.
FAULTS = [
    (os, "fchmod", 1, errno.EPERM),
    (os, "fchmod", 2, errno.EIO),
    (transaction, "stage", 2, errno.ENOSPC),
    (transaction, "examine", 1, errno.EIO),
    (os, "rename", "_runtime.py", errno.EIO),
    (os, "rename", "topk.py", errno.EROFS),
    (os, "rename", "topk.py", errno.EPERM),
    (transaction, "sync_folder", 1, errno.EIO),
    (transaction, "purge_bytecode", 2, errno.EACCES),
    (transaction, "examine", 3, errno.EIO),
    (transaction, "examine", 4, errno.EIO),
]


@pytest.mark.parametrize(("module", "name", "when", "number"), FAULTS)
@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_a_fault_at_any_step_leaves_the_files_as_they_were(
    package: Installation,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    when: int | str,
    number: int,
    links: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """Whatever fails, and whether or not the file system has hard links: originals there, no leftovers, said so."""
    real: Callable[..., Any] = getattr(module, name)
    uses = 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal uses
        target = Path(str(args[-1])).name
        uses += 1 if isinstance(when, int) or target == when else 0
        if uses == (when if isinstance(when, int) else 1) and (isinstance(when, int) or target == when):
            raise OSError(number, os.strerror(number), str(args[-1]))
        return real(*args, **options)

    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(module, name, fail)
    with pytest.raises(AgentError) as raised:
        package.commit()
    monkeypatch.undo()
    read_only_errors = (errno.EPERM, errno.EACCES, errno.EROFS)
    assert raised.value.code == ("does-not-fit" if number in read_only_errors else "failed")
    assert package.is_original()
    assert package.imported() == "original"
    (record,) = package.records()
    assert record["status"] == "failed"
    assert record["note"] == raised.value.message


def test_every_step_has_a_fault_that_is_tested(package: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails before or after it did its work is undone, one by one, whichever steps there are."""
    for number, step in enumerate(transaction.STEPS):
        for before in (True, False):

            def broken(
                work: transaction.Transaction,
                step: Callable[[transaction.Transaction], None] = step,
                before: bool = before,  # noqa: FBT001 - bound here, never passed
            ) -> None:
                if not before:
                    step(work)
                raise OSError(errno.EIO, "Input/output error")

            steps = [*transaction.STEPS[:number], broken, *transaction.STEPS[number + 1 :]]
            monkeypatch.setattr(transaction, "STEPS", steps)
            with pytest.raises(AgentError, match="Input/output error"):
                package.commit()
            monkeypatch.undo()
            assert package.is_original(), (step.__name__, before)
    assert {record["status"] for record in package.records()} == {"failed"}


def test_a_deadline_that_passes_between_two_renames_undoes_both(
    package: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm waits until the files are in one state or the other, then everything is put back."""
    real = os.rename

    def slow(source: str, target: str) -> None:
        real(source, target)
        if target == str(package.runtime):
            package.context.expire(DeadlineError(1))

    monkeypatch.setattr(os, "rename", slow)
    with pytest.raises(DeadlineError):
        package.commit()
    assert package.is_original()
    assert [record["status"] for record in package.records()] == ["failed"]


def test_a_file_that_changes_at_the_last_moment_is_not_overwritten(
    package: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installer that writes between the check and the rename keeps its bytes."""
    real = transaction.compile_all

    def meanwhile(work: transaction.Transaction) -> None:
        real(work)
        package.topk.write_bytes(b"newer = 2\n")

    steps = [meanwhile if step is real else step for step in transaction.STEPS]
    monkeypatch.setattr(transaction, "STEPS", steps)
    with pytest.raises(AgentError, match="changed while") as raised:
        package.commit()
    assert raised.value.code == "foreign-edit"
    assert package.topk.read_bytes() == b"newer = 2\n"
    assert not package.runtime.exists()


def test_what_cannot_be_put_back_is_said_and_stays_pending(
    package: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When undoing fails too, a person must act: the code says so, and the ledger keeps the revision open."""
    real = os.rename

    def broken(source: str, target: str) -> None:
        if target == str(package.topk) and (source.endswith(".was.tmp") or not package.runtime.exists()):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    def purge(_path: str) -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", broken)
    monkeypatch.setattr(transaction, "purge_bytecode", purge)
    with pytest.raises(AgentError, match="could not be put back") as raised:
        package.commit()
    assert raised.value.code == "rollback-failed"
    assert str(package.topk) in raised.value.message
    assert [record["status"] for record in package.records()] == ["pending"]


KILLED = """
import os, signal, sys
from surgeon.node.agent import transaction
from surgeon.node.agent.__main__ import perform
from surgeon.node.agent.protocol import Context
import json, time
where, state, args = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
real = os.rename
def die(source, target):
    if where == "before" and target.endswith("topk.py"):
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
    if where == "between" and target.endswith("_runtime.py") or where == "after" and target.endswith("topk.py"):
        os.kill(os.getpid(), signal.SIGKILL)
os.rename = die
perform("commit", args, Context(state, args["token"], time.monotonic() + 60))
"""


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_an_agent_that_is_killed_leaves_what_recovery_needs(package: Installation, where: str) -> None:
    """The pending record says what was and what was to be; a restore puts everything back and cleans up."""
    import json

    args = {**package.commit_args(), "site_id": package.site, "token": package.context.lease}
    command = [sys.executable, "-c", KILLED, where, package.context.state, json.dumps(args)]
    assert subprocess.run(command, check=False, cwd=Path.cwd(), timeout=60).returncode == -signal.SIGKILL
    (record,) = package.records()
    assert record["status"] == "pending"
    known = {file["path"]: {file["before"], file["after"]} for file in record["files"]}
    for path in (package.topk, package.runtime):
        assert (sha(path.read_bytes()) if path.exists() else None) in known[str(path)]
    assert any(name.startswith(".topk.py.surgeon-1.") for name in package.names())
    result = package.restore()
    assert result["swept"]
    assert package.is_original()
    assert package.imported() == "original"


def test_leftovers_of_an_agent_that_was_killed_are_swept_by_the_next_commit(package: Installation) -> None:
    """Temporary files of an earlier revision go; files that only look similar stay."""
    stray = Path(files.temporary(str(package.topk), 7))
    stray.write_bytes(b"half")
    similar = package.package / ".topk.py.swp"
    similar.write_bytes(b"an editor's")
    assert package.commit()["swept"] == [str(stray)]
    assert similar.exists()
    assert not stray.exists()
