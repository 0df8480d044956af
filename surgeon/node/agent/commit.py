"""The verbs that change an installation: each checks, writes down what it will do, does it or undoes it."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import lease, ledger
from .boot import read_private, write_private
from .files import Present, digest, examine, sweep
from .protocol import AgentError, Context, verb
from .state import locked, private, site_of
from .transaction import Change, Transaction, carry_out

CLOSED = ("applied", "failed", "rolled-back")


def _hash(present: Optional[Present]) -> Optional[str]:
    return None if present is None else digest(present.data)


def _name(sha256: Optional[str]) -> str:
    return "no file" if sha256 is None else "sha256 {}".format(sha256[:12])


def _check(found: Sequence[Tuple[str, Optional[str], Sequence[Optional[str]]]]) -> None:
    """Refuse when a file is none of what it may be; each item is path, hash found, hashes allowed."""
    wrong = [item for item in found if item[1] not in item[2]]
    if wrong:
        words = [
            "{} is {}, expected {}".format(path, _name(sha256), " or ".join(_name(word) for word in allowed))
            for path, sha256, allowed in wrong
        ]
        message = "Somebody else changed the installation: {}.".format("; ".join(words))
        advice = "Look at `surgeon diff`; reinstall the package, or keep the other edit and leave surgeon out."
        raise AgentError("foreign-edit", message, advice, wrong[0][0])


def _beside(path: str) -> Tuple[int, int, int]:
    """Return mode, owner and group for a new file: plain, and the directory's."""
    try:
        status = os.stat(os.path.dirname(path))
    except OSError as error:
        message = "There is no directory for {}: {}.".format(path, error.strerror)
        raise AgentError("does-not-fit", message, where=path) from error
    return 0o644, status.st_uid, status.st_gid


def _wanted(data: bytes, manner: Tuple[int, int, int], was: Optional[Present]) -> Present:
    mode, uid, gid = manner
    return Present(data, mode, uid, gid, 1, was.mtime if was is not None else 0)


def _decode(file: Dict[str, Any]) -> Optional[bytes]:
    if file.get("b64") is None:
        return None
    try:
        return base64.b64decode(file["b64"], validate=True)
    except binascii.Error as error:
        raise AgentError("usage", "The new bytes are not base64.", where=str(file["path"])) from error


def plan_commit(files: Sequence[Dict[str, Any]]) -> List[Change]:
    """Return the changes that a ``commit`` asks for, once everything is found as expected."""
    present = [(file, examine(str(file["path"]))) for file in files]
    _check([(str(file["path"]), _hash(was), [file.get("expect")]) for file, was in present])
    changes = []
    for file, was in present:
        path, data = str(file["path"]), _decode(file)
        model = examine(str(file["like"])) if file.get("like") else was
        if file.get("like") and model is None:
            raise AgentError("usage", "There is no file {} to take after.".format(file["like"]), where=path)
        manner = (model.mode, model.uid, model.gid) if model is not None else _beside(path)
        changes.append(Change(path, was, None if data is None else _wanted(data, manner, was)))
    return changes


def _recorded(folder: str, path: str, sha256: str) -> Optional[Tuple[int, int, int]]:
    """Return mode, owner and group that the ledger has for these bytes at this path."""
    for record in reversed(ledger.records(folder)):
        for file in record.get("files") or []:
            if file.get("path") == path and sha256 in (file.get("before"), file.get("after")):
                return int(file["mode"]), int(file["uid"]), int(file["gid"])
    return None


def plan_restore(files: Sequence[Dict[str, Any]], folder: str) -> List[Change]:
    """Return the changes that a ``restore`` asks for, once everything is found to be what the ledger knows."""
    present = [(file, examine(str(file["path"]))) for file in files]
    _check([(str(file["path"]), _hash(was), list(file["present"])) for file, was in present])
    changes = []
    for file, was in present:
        path, sha256 = str(file["path"]), file.get("restore")
        if sha256 is None:
            changes.append(Change(path, was, None))
            continue
        manner = _recorded(folder, path, str(sha256))
        if manner is None:
            manner = (was.mode, was.uid, was.gid) if was is not None else _beside(path)
        changes.append(Change(path, was, _wanted(load_object(folder, str(sha256)), manner, was)))
    return changes


def load_object(folder: str, sha256: str) -> bytes:
    """Return bytes that were kept under their hash.

    Raises:
        AgentError: they are gone or damaged.
    """
    path = os.path.join(folder, "objects", os.path.basename(sha256))
    try:
        data = read_private(path)
    except OSError as error:
        message = "The recorded bytes {} are not in the node's store: {}.".format(sha256[:12], error.strerror)
        raise AgentError("failed", message, "Reinstall the package to get the original.", path) from error
    if digest(data) != sha256:
        message = "The recorded bytes {} are damaged in the node's store.".format(sha256[:12])
        raise AgentError("failed", message, "Reinstall the package to get the original.", path)
    return data


def keep_objects(folder: str, changes: Sequence[Change]) -> None:
    """Keep every original and every result under its hash."""
    store = private(os.path.join(folder, "objects"))
    for present in [side for change in changes for side in (change.was, change.wanted) if side is not None]:
        path = os.path.join(store, digest(present.data))
        with contextlib.suppress(OSError):
            if read_private(path) == present.data:
                continue
        write_private(path, present.data)


def _entry(change: Change) -> Dict[str, Any]:
    side = change.was or change.wanted
    return {
        "path": change.path,
        "before": _hash(change.was),
        "after": _hash(change.wanted),
        "mode": side.mode if side else 0,
        "uid": side.uid if side else 0,
        "gid": side.gid if side else 0,
        "nlink": change.was.nlink if change.was else 0,
    }


def _check_writable(changes: Sequence[Change]) -> None:
    for change in changes:
        folder = os.path.dirname(change.path)
        # Root passes every check of modes; a read-only mount still answers no.
        if not os.access(folder, os.W_OK | os.X_OK):
            message = "The package is read-only for this user: {}.".format(folder)
            advice = "Work as the user who owns the installation, or make that directory writable."
            raise AgentError("does-not-fit", message, advice, folder)


def _perform(
    args: Dict[str, Any], context: Context, folder: str, changes: Sequence[Change], holder: Dict[str, Any]
) -> Dict[str, Any]:
    """Write down, do, and return one revision. The caller holds the lock and the lease."""
    if len({change.path for change in changes}) != len(changes) or not changes:
        raise AgentError("usage", "A change names each file once, and at least one file.")
    _check_writable(changes)
    swept = [path for change in changes for path in sweep(change.path)]
    keep_objects(folder, changes)
    known = ledger.records(folder)
    record = dict(
        args.get("record") or {},
        revision=known[-1]["revision"] + 1 if known else 1,
        status="pending",
        started=time.time(),
        files=[_entry(change) for change in changes],
        holder={key: holder[key] for key in ("owner", "host", "pid")},
    )
    ledger.append(folder, record)
    try:
        carry_out(Transaction(context, record["revision"], changes, args.get("interpreter")))
    except Exception as error:
        if getattr(error, "code", "") != "rollback-failed":
            # Left pending where this cannot be written; the next command finds the files as they were.
            with contextlib.suppress(OSError):
                closing = dict(record, status="failed", finished=time.time(), note=str(error))
                ledger.append(folder, closing)
        raise
    if args.get("last"):
        ledger.append(folder, dict(record, status="applied", finished=time.time(), gates=[]))
        lease.let_go(folder, context)
    return {"revision": record["revision"], "files": record["files"], "swept": swept}


@verb("commit")
def commit(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Write new bytes over files that are as expected; the revision stays pending until ``finish``.

    Args:
        args: ``site_id``; ``record``, free fields of the ledger's record; ``files``, each with ``path``, ``b64``
            (None removes), ``expect`` (a sha256; None when nothing may be there) and ``like`` (whose mode and owner
            to take; None for the file's own); ``interpreter``, which compiles the modules among them; ``last``:
            nothing follows, so close the revision as applied and let the lease go, all in this one round trip;
            ``lease``: take the lease first, with what ``lease acquire`` takes, and let it go if the write fails.
        context: must hold the lease, unless the args take it.

    Returns:
        ``revision``; ``files`` with ``before``, ``after``, ``mode``, ``uid``, ``gid`` and ``nlink``; ``swept``, the
        temporary files of an agent cut short earlier.

    Raises:
        AgentError: ``foreign-edit``, ``does-not-fit``, ``locked`` or ``failed``, and every file is as it was; or
            ``rollback-failed``.
    """
    folder = site_of(args, context)
    with locked(folder, context):
        alone = args.get("lease")
        if alone:
            context.lease = str(lease.acquire(folder, alone, context)["token"])
        holder = lease.require(folder, context)
        try:
            return _perform(args, context, folder, plan_commit(args.get("files") or []), holder)
        except BaseException:
            if alone:
                lease.let_go(folder, context)
            raise


@verb("restore")
def restore(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Put recorded bytes back, with the mode and owner that the ledger has for them.

    Args:
        args: as for ``commit``, but each of ``files`` has ``path``, ``present`` (hashes that may be there now, None
            for no file) and ``restore`` (the hash to put back, None to remove).
        context: must hold the lease.

    Returns:
        As ``commit`` does.

    Raises:
        AgentError: as ``commit`` does.
    """
    folder = site_of(args, context)
    with locked(folder, context):
        holder = lease.require(folder, context)
        return _perform(args, context, folder, plan_restore(args.get("files") or [], folder), holder)


@verb("finish")
def finish(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Close a revision.

    Args:
        args: ``site_id``, ``revision``, ``status`` (applied, failed or rolled-back), ``gates``, ``note``.
        context: must hold the lease.

    Returns:
        ``record``: the revision as the ledger has it now.

    Raises:
        AgentError: there is no such revision or status.
    """
    folder = site_of(args, context)
    status = args.get("status")
    if status not in CLOSED:
        raise AgentError("usage", "A revision ends as one of {}, not {!r}.".format(", ".join(CLOSED), status))
    with locked(folder, context):
        lease.require(folder, context)
        matching = [record for record in ledger.records(folder) if record["revision"] == args.get("revision")]
        if not matching:
            raise AgentError("usage", "The ledger has no revision {!r}.".format(args.get("revision")))
        # An agent that was killed between staging and renaming leaves temporary files, and nobody is at work now.
        for file in matching[0].get("files") or []:
            sweep(str(file["path"]))
        record = dict(matching[0], status=status, finished=time.time())
        record.update({key: args[key] for key in ("gates", "note") if args.get(key) is not None})
        ledger.append(folder, record)
    return {"record": record}
