"""Each state of a patch on a node, judged from a history, the bytes on disk and the running server."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from surgeon.ledger.records import FileChange, Ledger, Record, Status
from surgeon.ledger.state import FileFacts, PatchState, Verdict, judge_disk, judge_live

FOLDER = "/opt/venv/lib/python3.11/site-packages/sglang/srt/layers/moe"
TOPK, RUNTIME, SETTINGS = (f"{FOLDER}/{name}" for name in ("topk.py", "_surgeon_oea.py", "_surgeon_oea.json"))
INSTALLED, CUT, HELPER, KNOBS, KNOBS_2, STRANGE = (
    hashlib.sha256(text).hexdigest() for text in (b"installed", b"cut", b"runtime", b"k0 4", b"k0 5", b"by hand")
)
STAMP = "0123456789ab"

APPLIED = Record(
    1,
    "apply",
    "applied",
    patch="oea",
    patch_version="0.1.0",
    files=(
        FileChange(RUNTIME, None, HELPER, None),
        FileChange(SETTINGS, None, KNOBS, None),
        FileChange(TOPK, INSTALLED, CUT, INSTALLED),
    ),
    started=1000.0,
)
# A change of k0 writes the settings only.
CHANGED = Record(2, "apply", "applied", patch="oea", files=(FileChange(SETTINGS, KNOBS, KNOBS_2, None),), started=2e3)
ROLLED_BACK = Record(
    3,
    "rollback",
    "applied",
    of=1,
    files=(
        FileChange(TOPK, CUT, INSTALLED, INSTALLED),
        FileChange(SETTINGS, KNOBS_2, None, None),
        FileChange(RUNTIME, HELPER, None, None),
    ),
    started=3000.0,
)
BROUGHT_BACK = Record(
    4,
    "rollback",
    "applied",
    of=3,
    patch="oea",
    files=(
        FileChange(TOPK, INSTALLED, CUT, INSTALLED),
        FileChange(SETTINGS, None, KNOBS, None),
        FileChange(RUNTIME, None, HELPER, None),
    ),
    started=4000.0,
)


def plain(sha256: str = INSTALLED, *, record: str | None = INSTALLED, fits: bool = True) -> FileFacts:
    """A file without a graft."""
    return FileFacts(TOPK, sha256, record, grafted=False, stamp="", fits=fits, beside={RUNTIME: None, SETTINGS: None})


def grafted(sha256: str = CUT, *, runtime: str | None = HELPER, settings: str | None = KNOBS) -> FileFacts:
    """A file with a graft, and what lies beside it."""
    beside = {RUNTIME: runtime, SETTINGS: settings}
    return FileFacts(TOPK, sha256, INSTALLED, grafted=True, stamp=STAMP, fits=True, beside=beside)


def judge(facts: FileFacts, *records: Record, stamp: str = STAMP) -> Verdict:
    """What the disk says after these revisions."""
    return judge_disk(facts, Ledger(records), stamp=stamp)


def test_the_states_are_those_of_the_contract() -> None:
    """Programs that read --json rely on these nine words."""
    assert {state.value for state in PatchState} == {
        *("pristine", "applied", "stale", "foreign-edit", "reinstalled"),
        *("not-needed", "does-not-fit", "written-not-live", "live"),
    }


def test_pristine_is_a_file_as_record_says_on_a_node_without_history() -> None:
    """Nothing was ever done here."""
    verdict = judge(plain())
    assert verdict.state is PatchState.PRISTINE
    assert "RECORD" in verdict.why
    assert not verdict.state.on_disk


def test_pristine_again_after_a_rollback() -> None:
    """The history is longer, the file is the installed one."""
    assert judge(plain(), APPLIED, CHANGED, ROLLED_BACK).state is PatchState.PRISTINE


def test_pristine_where_record_does_not_list_the_file() -> None:
    """An editable or stripped install has no RECORD to compare with; the reason says so."""
    verdict = judge(plain(STRANGE, record=None))
    assert verdict.state is PatchState.PRISTINE
    assert "does not list it" in verdict.why


def test_pristine_by_the_ledger_where_record_says_otherwise() -> None:
    """An image that ships its own topk.py: after a rollback the kept original is there, and the reason names it."""
    own = replace(APPLIED, files=(FileChange(TOPK, STRANGE, CUT, STRANGE),))
    back = replace(ROLLED_BACK, files=(FileChange(TOPK, CUT, STRANGE, STRANGE),))
    verdict = judge(plain(STRANGE), own, back)
    assert verdict.state is PatchState.PRISTINE
    assert "this node's ledger keeps" in verdict.why


def test_applied_is_a_recorded_result_with_its_helpers() -> None:
    """The graft, the runtime and the settings are those that a revision wrote."""
    verdict = judge(grafted(), APPLIED)
    assert verdict == Verdict(PatchState.APPLIED, "the bytes are revision 1's", APPLIED)
    assert verdict.state.on_disk


def test_applied_after_a_change_of_settings_alone() -> None:
    """The file is the first revision's, the settings are the second's."""
    verdict = judge(grafted(settings=KNOBS_2), APPLIED, CHANGED)
    assert (verdict.state, verdict.revision) == (PatchState.APPLIED, APPLIED)


def test_applied_after_a_rollback_to_an_earlier_revision() -> None:
    """`rollback REVISION` may bring a graft back; these bytes are surgeon's own, written by the rollback."""
    verdict = judge(grafted(), APPLIED, CHANGED, ROLLED_BACK, BROUGHT_BACK)
    assert (verdict.state, verdict.revision) == (PatchState.APPLIED, BROUGHT_BACK)


def test_stale_is_a_graft_of_another_version_of_the_patch() -> None:
    """Both stamps are named."""
    verdict = judge(grafted(), APPLIED, stamp="ffffffffffff")
    assert (verdict.state, verdict.revision) == (PatchState.STALE, APPLIED)
    assert STAMP in verdict.why
    assert "ffffffffffff" in verdict.why
    assert verdict.state.on_disk


def test_stale_again_after_the_newer_patch_was_undone() -> None:
    """An upgrade whose gate failed restores the older graft: that is no foreign edit."""
    newer = hashlib.sha256(b"cut by the newer patch").hexdigest()
    upgrade = Record(2, "apply", "rolled-back", patch="oea", files=(FileChange(TOPK, CUT, newer, INSTALLED),))
    undone = Record(3, "rollback", "applied", of=2, patch="oea", files=(FileChange(TOPK, newer, CUT, INSTALLED),))
    assert judge(grafted(), APPLIED, upgrade, undone, stamp="ffffffffffff").state is PatchState.STALE


@pytest.mark.parametrize("status", ["failed", "pending"])
def test_foreign_edit_is_a_file_that_neither_record_nor_ledger_knows(status: Status) -> None:
    """Edited by hand, before or after any history; a revision that failed or hangs does not explain it."""
    for records in ((), (APPLIED,), (replace(APPLIED, status=status),)):
        verdict = judge(plain(STRANGE), *records)
        assert verdict.state is PatchState.FOREIGN_EDIT
        assert "neither" in verdict.why


def test_foreign_edit_is_a_graft_that_the_ledger_did_not_write() -> None:
    """A graft copied from another node, or edited since, or one whose writing failed."""
    failed = replace(APPLIED, status="failed")
    for facts, records in ((grafted(), ()), (grafted(STRANGE), (APPLIED,)), (grafted(), (failed,))):
        verdict = judge(facts, *records)
        assert (verdict.state, verdict.revision) == (PatchState.FOREIGN_EDIT, None)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (grafted(runtime=STRANGE), f"{RUNTIME} was changed by somebody else"),
        (grafted(runtime=None), f"{RUNTIME} is missing"),
        (grafted(settings=KNOBS_2), f"{SETTINGS} was changed by somebody else"),
    ],
)
def test_foreign_edit_is_a_helper_that_is_not_the_recorded_one(facts: FileFacts, words: str) -> None:
    """A graft without its runtime would stop sglang from importing: the file that is wrong is named."""
    assert judge(facts, APPLIED) == Verdict(PatchState.FOREIGN_EDIT, words, APPLIED)


@pytest.mark.parametrize(
    "records",
    [(APPLIED,), (APPLIED, CHANGED), (APPLIED, CHANGED, ROLLED_BACK, BROUGHT_BACK)],
    ids=["after-apply", "after-a-change-of-settings", "after-a-rollback-to-a-revision"],
)
def test_reinstalled_is_an_installed_file_where_a_graft_should_be(records: tuple[Record, ...]) -> None:
    """Somebody installed the package over the patch; whatever the last revision changed, the patch is gone."""
    verdict = judge(plain(), *records)
    assert verdict.state is PatchState.REINSTALLED
    assert verdict.revision in (APPLIED, BROUGHT_BACK)
    assert not verdict.state.on_disk


def test_reinstalled_by_another_release() -> None:
    """The newer release's file is what its own RECORD says, and no revision knows it."""
    assert judge(plain(STRANGE, record=STRANGE), APPLIED).state is PatchState.REINSTALLED


def test_a_rollback_that_is_not_closed_yet_replaced_no_package() -> None:
    """Its bytes are the original's before its revision counts; nobody reinstalled anything."""
    pending = replace(ROLLED_BACK, status="pending")
    assert judge(plain(), APPLIED, pending).state is PatchState.PRISTINE


def test_not_needed_is_an_installed_file_that_does_it_itself() -> None:
    """What the locator saw is the reason; a file that somebody changed is a foreign edit all the same."""
    facts = replace(plain(fits=False), upstream="sglang has batch-aware routing of its own.")
    assert judge(facts) == Verdict(PatchState.NOT_NEEDED, "sglang has batch-aware routing of its own.")
    assert judge(replace(facts, sha256="0" * 64)).state is PatchState.FOREIGN_EDIT


def test_does_not_fit_is_an_installed_file_without_a_site() -> None:
    """A release whose select_experts has another shape."""
    assert judge(plain(fits=False)).state is PatchState.DOES_NOT_FIT


ON_DISK = Verdict(PatchState.APPLIED, "the bytes are revision 1's", APPLIED)


@pytest.mark.parametrize(
    ("started", "problems", "words"),
    [
        (None, (), "no server is running"),
        (999.0, (), "started before"),
        (1001.0, ("scheduler TP1 (pid 7) has written no beacon", "another"), "TP1"),
    ],
)
def test_written_not_live_says_what_is_missing(started: float | None, problems: tuple[str, ...], words: str) -> None:
    """No server, one that is older than the bytes, or a worker that does not report: never live."""
    verdict = judge_live(ON_DISK, written_at=1000.0, server_started=started, beacon_problems=problems)
    assert (verdict.state, verdict.revision) == (PatchState.WRITTEN_NOT_LIVE, APPLIED)
    assert words in verdict.why
    assert verdict.state.on_disk


def test_live_is_a_newer_server_whose_every_worker_reported() -> None:
    """The only way to live: bytes, start time and beacons agree."""
    verdict = judge_live(ON_DISK, written_at=1000.0, server_started=1001.0, beacon_problems=())
    assert (verdict.state, verdict.revision) == (PatchState.LIVE, APPLIED)
    assert verdict.state.on_disk


@pytest.mark.parametrize("state", sorted(set(PatchState) - {PatchState.APPLIED}))
def test_a_server_refines_applied_only(state: PatchState) -> None:
    """Whatever else the disk says stands, however well the server runs."""
    disk = Verdict(state, "by the disk")
    assert judge_live(disk, written_at=0.0, server_started=1.0, beacon_problems=()) is disk
