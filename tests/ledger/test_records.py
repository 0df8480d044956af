"""What a node's ledger says: lines into revisions, and revisions into the questions that operations ask."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from surgeon.ledger.records import FileChange, Gate, Lease, Ledger, Record, fold, parse_ledger
from surgeon.node.agent import ledger as node_ledger

if TYPE_CHECKING:
    from pathlib import Path

TOPK = "/opt/venv/lib/python3.11/site-packages/sglang/srt/layers/moe/topk.py"
RUNTIME = TOPK.replace("topk.py", "_surgeon_oea.py")


def sha(text: str) -> str:
    """The sha256 of some bytes, as the ledger keeps it."""
    return hashlib.sha256(text.encode()).hexdigest()


INSTALLED, CUT, CUT_AGAIN, HELPER = sha("installed"), sha("cut"), sha("cut again"), sha("runtime")


def line(revision: int, status: str = "applied", **more: Any) -> dict[str, Any]:
    """One line of a ledger."""
    return {"revision": revision, "kind": "apply", "status": status, **more}


def file(path: str, before: str | None, after: str | None) -> dict[str, Any]:
    """One file of a line."""
    return {"path": path, "before": before, "after": after, "mode": 0o644, "uid": 0, "gid": 0, "nlink": 1}


def history() -> Ledger:
    """Applied, applied again by a newer patch whose gate failed, that undone, then rolled back to the original."""
    originals = {TOPK: INSTALLED, RUNTIME: None}
    return parse_ledger(
        {
            "records": [
                line(1, files=[file(RUNTIME, None, HELPER), file(TOPK, INSTALLED, CUT)], originals=originals),
                line(2, "rolled-back", files=[file(TOPK, CUT, CUT_AGAIN)], originals=originals),
                line(3, kind="rollback", of=2, files=[file(TOPK, CUT_AGAIN, CUT)]),
                line(4, "failed", files=[file(TOPK, CUT, sha("never written"))], originals=originals),
                line(5, kind="rollback", of=1, files=[file(TOPK, CUT, INSTALLED), file(RUNTIME, HELPER, None)]),
            ]
        }
    )


def test_a_whole_line_becomes_a_record() -> None:
    """Every field of the contract arrives under its name and with its type."""
    (record,) = fold(
        [
            {
                **line(7, "rolled-back", kind="rollback", of=6),
                "patch": "oea",
                "patch_version": "0.1.0",
                "patch_hash": "ab" * 32,
                "settings": {"k0": 4},
                "version": "0.5.9",
                "files": [file(TOPK, CUT, INSTALLED)],
                "originals": {TOPK: INSTALLED},
                "who": "ada",
                "from": "laptop",
                "started": 100,
                "finished": 160.5,
                "gates": [{"name": "ready", "passed": True, "detail": "200", "seconds": 12.5}],
                "note": "by hand",
                "holder": {"owner": "ada"},
            }
        ]
    )
    assert record == Record(
        revision=7,
        kind="rollback",
        status="rolled-back",
        of=6,
        patch="oea",
        patch_version="0.1.0",
        patch_hash="ab" * 32,
        settings={"k0": 4},
        version="0.5.9",
        files=(FileChange(TOPK, CUT, INSTALLED, INSTALLED),),
        who="ada",
        came_from="laptop",
        started=100.0,
        finished=160.5,
        gates=(Gate("ready", passed=True, detail="200", seconds=12.5),),
        note="by hand",
    )


def test_the_later_line_of_a_revision_wins_and_what_it_leaves_out_stays() -> None:
    """A closing line need not repeat the files; what it says anew replaces the pending line's."""
    pending = line(1, "pending", files=[file(TOPK, INSTALLED, CUT)], started=10.0, note="")
    (record,) = fold([pending, line(1, "applied", finished=20.0, note="done")])
    assert (record.status, record.started, record.finished, record.note) == ("applied", 10.0, 20.0, "done")
    assert record.change(TOPK) == FileChange(TOPK, INSTALLED, CUT)


@given(order=st.permutations(range(1, 8)))
def test_revisions_are_sorted_by_number_whatever_the_order_of_lines(order: list[int]) -> None:
    """Two clients' lines may interleave; the revisions still come oldest first."""
    assert [record.revision for record in fold(line(number) for number in order)] == list(range(1, 8))


def test_lines_that_are_no_revision_are_passed_over() -> None:
    """A line of a later surgeon without a revision, or with one that is no number, hides no other line."""
    lines = [line(1), {"note": "no revision"}, {"revision": "2"}, {"revision": None}, line(3, unheard_of={"x": 1})]
    assert [record.revision for record in fold(lines)] == [1, 3]


def test_an_unknown_status_is_never_taken_for_applied() -> None:
    """A status that this surgeon does not know counts as failed: nothing is built on it."""
    records = fold([line(1), line(2, "committed"), {"revision": 3}])
    assert [record.status for record in records] == ["applied", "failed", "failed"]
    assert Ledger(records).head == records[0]


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    """On the node's real file: the half line that a crash left is skipped, those before and after it count."""
    node_ledger.append(str(tmp_path), line(1))
    with (tmp_path / "ledger.jsonl").open("ab") as file_:
        file_.write(b'{"kind": "apply", "revision": 2, "sta')
    node_ledger.append(str(tmp_path), line(3, "pending"))
    whole, torn = node_ledger.read_lines(str(tmp_path))
    assert [(record.revision, record.status) for record in fold(whole)] == [(1, "applied"), (3, "pending")]
    assert [one["line"] for one in torn] == [2]


def test_an_empty_ledger_has_no_answers() -> None:
    """A node that surgeon never changed."""
    ledger = parse_ledger({})
    assert ledger == Ledger()
    assert (ledger.pending, ledger.head, ledger.latest(TOPK), ledger.get(1)) == (None, None, None, None)
    assert ledger.original(TOPK, INSTALLED) is None
    assert ledger.producer(TOPK, INSTALLED) is None


def test_head_is_the_newest_revision_that_counts() -> None:
    """Failed, rolled-back and pending revisions are no head; a rollback is one."""
    ledger = history()
    assert ledger.head == ledger.get(5)
    more = Ledger((*ledger.records, *fold([line(6, "failed"), line(7, "pending")])))
    assert more.head == ledger.get(5)


def test_pending_is_the_newest_revision_that_was_never_closed() -> None:
    """Only a revision whose last line says pending counts."""
    assert history().pending is None
    records = fold([line(1, "pending"), line(1, "applied"), line(2, "pending")])
    assert Ledger(records).pending == records[1]


def test_the_producer_is_the_newest_revision_with_that_result() -> None:
    """Of two revisions that left the same bytes the later one made those that lie there now; failed ones made none."""
    ledger = history()
    assert ledger.producer(TOPK, CUT) == ledger.get(3)
    assert ledger.producer(TOPK, CUT_AGAIN) == ledger.get(2)
    assert ledger.producer(TOPK, sha("never written")) is None
    assert ledger.producer(RUNTIME, CUT) is None


def test_latest_is_the_newest_revision_that_counts_for_a_file() -> None:
    """What was undone or failed is passed over, and so is what changed other files only."""
    ledger = history()
    assert ledger.latest(TOPK) == ledger.get(5)
    assert Ledger(ledger.records[:4]).latest(TOPK) == ledger.get(3)
    assert Ledger(ledger.records[:4]).latest(RUNTIME) == ledger.get(1)


def test_the_original_is_that_of_the_revision_that_made_the_present_bytes() -> None:
    """After a reinstall of another release each result still leads to its own original."""
    newer, newer_cut = sha("newer release"), sha("newer release, cut")
    ledger = parse_ledger(
        {
            "records": [
                line(1, files=[file(TOPK, INSTALLED, CUT)], originals={TOPK: INSTALLED}),
                line(2, files=[file(TOPK, newer, newer_cut)], originals={TOPK: newer}),
            ]
        }
    )
    assert ledger.original(TOPK, CUT) == INSTALLED
    assert ledger.original(TOPK, newer_cut) == newer
    assert ledger.original(TOPK, sha("unknown")) is None


def test_an_original_that_a_line_does_not_say_is_that_of_the_revision_before() -> None:
    """Left out is not the same as "the package does not bring this file": a rollback would remove topk.py for that."""
    ledger = history()
    for number in (3, 5):
        record = ledger.get(number)
        assert record is not None
        change = record.change(TOPK)
        assert change is not None
        assert change.original == INSTALLED
    head = ledger.head
    assert head is not None
    assert head.change(RUNTIME) == FileChange(RUNTIME, HELPER, None, None)


def test_a_lease_is_read_and_described_for_a_person() -> None:
    """Whoever is kept out learns who holds the node, on which machine and by which process."""
    raw = {"owner": "ada", "host": "laptop", "pid": 4242, "token": "t0", "started": 5, "expires": 65}
    lease = parse_ledger({"records": [], "lease": raw}).lease
    assert lease == Lease("ada", "laptop", 4242, "t0", 5.0, 65.0)
    assert lease.describe() == "ada on laptop (pid 4242)"


def test_a_gate_is_kept_with_its_seconds_rounded() -> None:
    """The ledger keeps hundredths of a second."""
    kept = Gate("smoke", passed=False, detail="no tokens", seconds=1.23456).to_json()
    assert kept == {"name": "smoke", "passed": False, "detail": "no tokens", "seconds": 1.23}
