"""In which state a patch is on a node: judged from bytes, ledger, RECORD, the running server and its beacons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surgeon.ledger.records import Ledger, Record


class PatchState(StrEnum):
    """The states of contracts.md; each value is what people and ``--json`` see."""

    PRISTINE = "pristine"
    APPLIED = "applied"
    STALE = "stale"
    FOREIGN_EDIT = "foreign-edit"
    REINSTALLED = "reinstalled"
    NOT_NEEDED = "not-needed"
    DOES_NOT_FIT = "does-not-fit"
    WRITTEN_NOT_LIVE = "written-not-live"
    LIVE = "live"

    @property
    def on_disk(self) -> bool:
        """Whether surgeon's bytes are in the file."""
        return self in {PatchState.APPLIED, PatchState.STALE, PatchState.WRITTEN_NOT_LIVE, PatchState.LIVE}


@dataclass(frozen=True)
class Verdict:
    """A state, why it was judged so, and the revision that made it, if one did."""

    state: PatchState
    why: str
    revision: Record | None = None


@dataclass(frozen=True)
class FileFacts:
    """What is on disk.

    Attributes:
        path: of the patched file.
        sha256: of its present bytes.
        record_sha256: what the package's RECORD says, None if RECORD does not say.
        grafted: whether a graft of ours was recognised in it.
        stamp: the stamp of that graft.
        fits: whether a site was found (or a graft is there).
        beside: sha256 of the runtime and the settings beside it, by path; None where missing.
        upstream: what says that upstream does by now what the patch would do; empty if nothing does.
    """

    path: str
    sha256: str
    record_sha256: str | None
    grafted: bool
    stamp: str
    fits: bool
    beside: dict[str, str | None]
    upstream: str = ""


def judge_disk(facts: FileFacts, ledger: Ledger, *, stamp: str) -> Verdict:
    """The state as far as the disk can tell: everything but live."""
    return _judge_grafted(facts, ledger, stamp) if facts.grafted else _judge_plain(facts, ledger)


def _judge_grafted(facts: FileFacts, ledger: Ledger, stamp: str) -> Verdict:
    producer = ledger.producer(facts.path, facts.sha256)
    if producer is None:
        return Verdict(PatchState.FOREIGN_EDIT, "the file holds a graft that this node's ledger did not write")
    changed = _changed_beside(facts, ledger, producer)
    if changed:
        return Verdict(PatchState.FOREIGN_EDIT, changed, producer)
    if facts.stamp != stamp:
        return Verdict(
            PatchState.STALE,
            f"the graft is of another version of {producer.patch} ({facts.stamp}); this surgeon brings {stamp}",
            producer,
        )
    return Verdict(PatchState.APPLIED, f"the bytes are revision {producer.revision}'s", producer)


def _judge_plain(facts: FileFacts, ledger: Ledger) -> Verdict:
    as_installed = facts.record_sha256 is not None and facts.sha256 == facts.record_sha256
    known_original = any(
        change.original == facts.sha256
        for record in ledger.records
        for change in record.files
        if change.path == facts.path
    )
    # A later revision may have changed settings only, and a rollback may have brought an earlier graft back.
    last = ledger.latest(facts.path)
    change = last.change(facts.path) if last else None
    if facts.record_sha256 is not None and not as_installed and not known_original:
        return Verdict(
            PatchState.FOREIGN_EDIT,
            "the file is neither what the package's RECORD says nor anything that this node's ledger knows",
        )
    writer = ledger.producer(facts.path, facts.sha256)
    # A rollback that is still pending has written the original, and nobody replaced the package.
    newer = last is not None and (writer is None or writer.revision < last.revision)
    if last is not None and newer and change is not None and change.after != change.original:
        return Verdict(
            PatchState.REINSTALLED,
            f"the package was replaced since revision {last.revision}; the patch is gone",
            last,
        )
    if facts.upstream:
        return Verdict(PatchState.NOT_NEEDED, facts.upstream)
    if not facts.fits:
        return Verdict(PatchState.DOES_NOT_FIT, "no place for the patch was found in this file")
    if facts.record_sha256 is None:
        return Verdict(PatchState.PRISTINE, "no graft is in the file (the package's RECORD does not list it)")
    if not as_installed:
        return Verdict(PatchState.PRISTINE, "the file is the original that this node's ledger keeps")
    return Verdict(PatchState.PRISTINE, "the file is what the package's RECORD says")


def _changed_beside(facts: FileFacts, ledger: Ledger, producer: Record) -> str:
    for path, present in facts.beside.items():
        latest = next(
            (r for r in reversed(ledger.records) if r.status in {"applied", "pending"} and r.change(path)), producer
        )
        change = latest.change(path)
        if change is not None and change.after is not None and change.after != present:
            found = "is missing" if present is None else "was changed by somebody else"
            return f"{path} {found}"
    return ""


def judge_live(
    disk: Verdict, *, written_at: float, server_started: float | None, beacon_problems: tuple[str, ...]
) -> Verdict:
    """Refine ``applied`` by the running server: live, or written and not live.

    Args:
        disk: what the disk says.
        written_at: when the bytes were written, seconds since the epoch by the node's clock.
        server_started: when the running server started, None if none runs.
        beacon_problems: why the beacons do not prove it; empty if every worker's beacon does.
    """
    if disk.state is not PatchState.APPLIED:
        return disk
    if server_started is None:
        return Verdict(PatchState.WRITTEN_NOT_LIVE, "no server is running", disk.revision)
    if server_started < written_at:
        return Verdict(
            PatchState.WRITTEN_NOT_LIVE, "the running server was started before the bytes were written", disk.revision
        )
    if beacon_problems:
        return Verdict(PatchState.WRITTEN_NOT_LIVE, beacon_problems[0], disk.revision)
    return Verdict(PatchState.LIVE, "every worker reported this patch from inside the forward pass", disk.revision)
