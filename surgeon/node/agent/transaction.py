"""Replaces several files of a package, all of them or none: staged, compiled, renamed over, read back, or undone."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, List, NamedTuple, Optional, Sequence

from . import children
from .files import (
    Present,
    digest,
    examine,
    purge_bytecode,
    refusal,
    stage,
    sync_folder,
    temporary,
    temporary_prefix,
)
from .protocol import AgentError, Context

# Compiles in memory: nothing is written, so nothing is left in the package.
_COMPILE = (
    "import sys\n"
    "for staged, path in zip(sys.argv[1::2], sys.argv[2::2]):\n"
    "    with open(staged, 'rb') as file:\n"
    "        compile(file.read(), path, 'exec', dont_inherit=True)\n"
)


class Change(NamedTuple):
    """One file to replace, to create or to remove.

    Attributes:
        path: the file.
        was: what is there now; None when nothing is.
        wanted: what shall be there; None to remove the file.
    """

    path: str
    was: Optional[Present]
    wanted: Optional[Present]


class Transaction:
    """The changes of one revision and how far they have come.

    Attributes:
        context: the verb's context.
        revision: names the temporary files, so that a later agent knows whose they are.
        changes: in the order in which they take effect.
        interpreter: the Python that will import the files; None when none of them is a module.
        attempted: the changes whose files may no longer be as they were.
    """

    def __init__(self, context: Context, revision: int, changes: Sequence[Change], interpreter: Optional[str]) -> None:
        self.context = context
        self.revision = revision
        self.changes = list(changes)
        self.interpreter = interpreter
        self.attempted: List[Change] = []

    def staged(self, change: Change) -> str:
        """Return the temporary file that will be renamed over a change's file."""
        return temporary(change.path, self.revision)

    def stashed(self, change: Change) -> str:
        """Return the second name that a change's original has until the transaction is over."""
        name = "{}{}.was.tmp".format(temporary_prefix(change.path), self.revision)
        return os.path.join(os.path.dirname(change.path), name)

    def folders(self) -> List[str]:
        """Return the directories that the changes are in."""
        return sorted({os.path.dirname(change.path) for change in self.changes})


def stage_all(transaction: Transaction) -> None:
    """Write every new file beside the one it will replace."""
    for change in transaction.changes:
        if change.wanted is not None:
            stage(transaction.staged(change), change.path, change.wanted)


def compile_all(transaction: Transaction) -> None:
    """Have the interpreter that will import the staged modules compile them.

    Raises:
        AgentError: one of them does not compile (``does-not-fit``), or no interpreter was named.
    """
    pairs: List[str] = []
    for change in transaction.changes:
        if change.wanted is not None and change.path.endswith(".py"):
            pairs += [transaction.staged(change), change.path]
    if not pairs:
        return
    if transaction.interpreter is None:
        raise AgentError("usage", "A module is to be written and no interpreter was named to compile it with.")
    argv = [transaction.interpreter, "-I", "-S", "-B", "-c", _COMPILE, *pairs]
    ended = children.run(transaction.context, argv)
    if ended.returncode != 0:
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()[-4:]
        message = "{} cannot compile what would be written: {}".format(transaction.interpreter, " ".join(said))
        raise AgentError("does-not-fit", message, "Nothing was written; report this.", pairs[1])


def stash_all(transaction: Transaction) -> None:
    """Give every original a second name, so that undoing needs neither space nor a write.

    Where the file system has no hard links, undoing writes the bytes again.
    """
    for change in transaction.changes:
        if change.was is not None:
            with contextlib.suppress(OSError):
                os.link(change.path, transaction.stashed(change))


def replace_all(transaction: Transaction) -> None:
    """Put the new files in place, in order.

    Raises:
        AgentError: somebody changed a file since it was looked at (``foreign-edit``).
    """
    with transaction.context.shield():
        for change in transaction.changes:
            now = examine(change.path)
            if (now and now.data) != (change.was and change.was.data):
                message = "{} changed while it was being replaced.".format(change.path)
                raise AgentError("foreign-edit", message, "Find out who writes there, then try again.", change.path)
            transaction.attempted.append(change)
            if change.wanted is not None:
                os.rename(transaction.staged(change), change.path)
            elif change.was is not None:
                os.unlink(change.path)
        for folder in transaction.folders():
            sync_folder(folder)


def purge_all(transaction: Transaction) -> None:
    """Remove the bytecode of the modules that were replaced."""
    for change in transaction.changes:
        purge_bytecode(change.path)


def verify_all(transaction: Transaction) -> None:
    """Read every file back.

    Raises:
        AgentError: one is not what was written.
    """
    for change in transaction.changes:
        now = examine(change.path)
        found = now and (now.data, now.mode, now.uid, now.gid)
        wanted = change.wanted
        expected = wanted and (wanted.data, wanted.mode, wanted.uid, wanted.gid)
        if found != expected:
            message = "{} is not what was just written (sha256 {}, expected {}).".format(
                change.path, now and digest(now.data), wanted and digest(wanted.data)
            )
            raise AgentError("failed", message, "Find out who else writes there.", change.path)


STEPS: Sequence[Callable[[Transaction], None]] = (
    stage_all,
    compile_all,
    stash_all,
    replace_all,
    purge_all,
    verify_all,
)


def carry_out(transaction: Transaction) -> None:
    """Take every step, or leave the files as they were.

    Raises:
        AgentError: a step failed and everything is as it was; or code ``rollback-failed``: it is not.
    """
    try:
        for step in STEPS:
            try:
                step(transaction)
            except OSError as error:
                where = transaction.changes[0].path
                raise refusal(error, _subject(error, where)) from error
    except BaseException:
        _undo(transaction)
        raise
    finally:
        _clean(transaction)


def _subject(error: OSError, otherwise: str) -> str:
    return os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else otherwise


def _clean(transaction: Transaction) -> None:
    for change in transaction.changes:
        for leftover in (transaction.staged(change), transaction.stashed(change)):
            with contextlib.suppress(OSError):
                os.unlink(leftover)


def _put_back(transaction: Transaction, change: Change) -> None:
    now = examine(change.path)
    if change.was is None:
        if now is not None:
            os.unlink(change.path)
    elif os.path.lexists(transaction.stashed(change)):
        os.rename(transaction.stashed(change), change.path)
    elif now is None or now[:4] != change.was[:4]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(transaction.staged(change))
        stage(transaction.staged(change), change.path, change.was)
        os.rename(transaction.staged(change), change.path)
    purge_bytecode(change.path)


def _undo(transaction: Transaction) -> None:
    left: List[str] = []
    with transaction.context.shield():
        for change in reversed(transaction.attempted):
            try:
                _put_back(transaction, change)
            except (OSError, AgentError) as error:
                left.append("{} ({})".format(change.path, error))
        for folder in transaction.folders():
            # The bytes are back either way; only a power cut now could tell the difference.
            with contextlib.suppress(OSError):
                sync_folder(folder)
    if left:
        message = "A write failed, and these files could not be put back: {}.".format("; ".join(left))
        advice = "Their originals are in the node's objects folder, named by sha256; run `surgeon rollback`."
        raise AgentError("rollback-failed", message, advice, transaction.attempted[0].path)
