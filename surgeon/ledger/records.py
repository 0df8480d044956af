"""What the ledger of a node says: revisions, their files, and the lease.

The ledger itself lies on the node (contracts: ``<state>/<site id>/ledger.jsonl``, append-only). A revision is written
twice: pending before anything is touched, and closed afterwards; of the lines of one revision the later one wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Status = Literal["pending", "applied", "failed", "rolled-back"]
STATUSES: Final[tuple[Status, ...]] = ("pending", "applied", "failed", "rolled-back")


@dataclass(frozen=True)
class FileChange:
    """One file of a revision.

    Attributes:
        path: absolute path on the node.
        before: sha256 before, None if the file did not exist.
        after: sha256 after, None if the file was removed.
        original: sha256 of the file as its package installed it, None if the package does not bring it.
    """

    path: str
    before: str | None
    after: str | None
    original: str | None = None


@dataclass(frozen=True)
class Gate:
    """One check that a revision had to pass."""

    name: str
    passed: bool
    detail: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As the ledger keeps it."""
        return {"name": self.name, "passed": self.passed, "detail": self.detail, "seconds": round(self.seconds, 2)}


@dataclass(frozen=True)
class Record:
    """One revision, as its latest line in the ledger tells it.

    Times are seconds since the epoch by the node's clock; ``finished`` is 0 while pending.
    """

    revision: int
    kind: str
    status: Status
    of: int | None = None
    patch: str = ""
    patch_version: str = ""
    patch_hash: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    files: tuple[FileChange, ...] = ()
    who: str = ""
    came_from: str = ""
    started: float = 0.0
    finished: float = 0.0
    gates: tuple[Gate, ...] = ()
    note: str = ""

    def change(self, path: str) -> FileChange | None:
        """What this revision did to that file, if anything."""
        return next((f for f in self.files if f.path == path), None)


@dataclass(frozen=True)
class Lease:
    """Who may change this node now. ``expires`` is seconds since the epoch by the node's clock."""

    owner: str
    host: str
    pid: int
    token: str
    started: float
    expires: float

    def describe(self) -> str:
        """Who it is, for a person."""
        return f"{self.owner} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Ledger:
    """All revisions of one site-packages, oldest first, and the lease if one is held."""

    records: tuple[Record, ...] = ()
    lease: Lease | None = None

    @property
    def pending(self) -> Record | None:
        """The revision that was begun and never closed, if there is one."""
        return next((r for r in reversed(self.records) if r.status == "pending"), None)

    @property
    def head(self) -> Record | None:
        """The latest revision that changed the node and still counts."""
        return next((r for r in reversed(self.records) if r.status == "applied"), None)

    def original(self, path: str, present: str | None) -> str | None:
        """The sha256 that ``path`` had when its package was installed, by the revision that made ``present``."""
        for record in reversed(self.records):
            change = record.change(path)
            if change is not None and change.after == present and record.status != "failed":
                return change.original
        return None

    def producer(self, path: str, sha256: str) -> Record | None:
        """The latest revision whose result for ``path`` has that sha256."""
        for record in reversed(self.records):
            change = record.change(path)
            if change is not None and change.after == sha256 and record.status != "failed":
                return record
        return None

    def latest(self, path: str) -> Record | None:
        """The latest revision that changed ``path`` and still counts."""
        return next((r for r in reversed(self.records) if r.status == "applied" and r.change(path)), None)

    def get(self, revision: int) -> Record | None:
        """The revision of that number."""
        return next((r for r in self.records if r.revision == revision), None)


def parse_ledger(raw: Mapping[str, Any]) -> Ledger:
    """The ledger from an agent's answer: ``{"records": [...], "lease": {...} or None}``."""
    lease = raw.get("lease")
    return Ledger(
        records=fold(raw.get("records", ())),
        lease=Lease(
            owner=str(lease.get("owner", "")),
            host=str(lease.get("host", "")),
            pid=int(lease.get("pid", 0)),
            token=str(lease.get("token", "")),
            started=float(lease.get("started", 0.0)),
            expires=float(lease.get("expires", 0.0)),
        )
        if lease
        else None,
    )


def fold(lines: Iterable[Mapping[str, Any]]) -> tuple[Record, ...]:
    """Revisions from the ledger's lines: fields of later lines of one revision replace those of earlier ones.

    A revision that does not say what a file's original was takes that from the revision before it: "not said" must
    never read as "the package does not bring it", which would make a rollback remove the file.
    """
    merged: dict[int, dict[str, Any]] = {}
    for line in lines:
        number = line.get("revision")
        if isinstance(number, int):
            merged.setdefault(number, {}).update(line)
    records: list[Record] = []
    originals: dict[str, str | None] = {}
    for number in sorted(merged):
        records.append(_record(merged[number], originals))
        originals |= {change.path: change.original for change in records[-1].files}
    return tuple(records)


def _record(raw: Mapping[str, Any], known: Mapping[str, str | None]) -> Record:
    originals: Mapping[str, str | None] = {**known, **(raw.get("originals") or {})}
    status = raw.get("status")
    return Record(
        revision=int(raw["revision"]),
        kind=str(raw.get("kind", "")),
        status=status if status in STATUSES else "failed",
        of=raw.get("of"),
        patch=str(raw.get("patch", "")),
        patch_version=str(raw.get("patch_version", "")),
        patch_hash=str(raw.get("patch_hash", "")),
        settings=raw.get("settings") or {},
        version=str(raw.get("version", "")),
        files=tuple(
            FileChange(f["path"], f.get("before"), f.get("after"), originals.get(f["path"]))
            for f in raw.get("files") or ()
        ),
        who=str(raw.get("who", "")),
        came_from=str(raw.get("from", "")),
        started=float(raw.get("started") or 0.0),
        finished=float(raw.get("finished") or 0.0),
        gates=tuple(
            Gate(str(g.get("name")), bool(g.get("passed")), str(g.get("detail", "")), float(g.get("seconds") or 0.0))
            for g in raw.get("gates") or ()
        ),
        note=str(raw.get("note", "")),
    )
