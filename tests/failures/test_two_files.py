"""Two files are cut and several modules added: all of it or nothing, also over what version 0.1.0 left on a node."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from surgeon import patches
from surgeon.operations import apply
from surgeon.operations.observer import Silent
from tests.support.local_node import local_node

if TYPE_CHECKING:
    from tests.support.bed import Bed

pytestmark = pytest.mark.wheels

OLD_RUNTIME = b'PATCH_VERSION = "0.1.0"\nactive = True\n\n\ndef route(*given, **more):\n    return given[:2]\n'


def apply_0_1_0(bed: Bed) -> None:
    """Apply as version 0.1.0 of the patch was: one graft, one module, and the settings of its time."""
    new = patches.load("oea")
    kept = ("enabled", "k0", "refill", "min_rows", "max_rows", "stats")
    old = replace(
        new,
        version="0.1.0",
        hash="0" * 64,
        runtime=OLD_RUNTIME,
        parts=(),
        announce="",
        settings={name: new.settings[name] for name in kept},
        specs={name: new.specs[name] for name in kept},
    )
    with local_node(bed.ssh.state_dir, python=str(bed.fake.python), port=bed.fake.port) as node:
        done = apply.run(node, node.target, old, {"k0": 6}, apply.Options(bench=False), Silent(), lambda _: True)
    assert done.status == "applied"
    assert bed.names() == {"__init__.py", "topk.py", "_surgeon_oea.py", "_surgeon_oea.json"}


def test_what_version_0_1_0_applied_is_replaced_and_both_can_be_returned_to(bed: Bed) -> None:
    """Stale; the new one brings two grafts; `rollback 1` is 0.1.0 byte for byte, `rollback` is as installed."""
    apply_0_1_0(bed)
    old = bed.files()
    status = bed.status()
    assert status["state"]["state"] == "stale"
    assert [one["kind"] for one in bed.surgeon("history", "--json").result["revisions"]] == ["apply"]
    assert bed.apply("--k0", "4").code == 0
    assert bed.is_patched()
    assert bed.rollback("1").code == 0
    assert {path: facts[:5] for path, facts in bed.files().items()} == {path: facts[:5] for path, facts in old.items()}
    assert bed.rollback().code == 0
    assert bed.is_original()


def test_what_version_0_1_0_applied_is_rolled_back_by_this_one(bed: Bed) -> None:
    """Its ledger knows nothing of a second file, and none is touched."""
    runner = bed.fake.runner.stat()
    apply_0_1_0(bed)
    assert bed.rollback().code == 0
    assert bed.is_original()
    assert bed.fake.runner.stat().st_mtime_ns == runner.st_mtime_ns


def test_an_edit_in_either_file_stops_apply_and_rollback(bed: Bed) -> None:
    """Exit 8 names model_runner.py: before the patch is in, and on top of it; the edit stays."""
    path = bed.fake.runner
    for commands in ([bed.apply], [bed.apply, bed.rollback]):
        ours = path.read_bytes()
        path.write_bytes(ours + b"\nprint('here')\n")
        before = bed.facts()
        for command in commands:
            answer = command()
            assert answer.code == 8, answer
            assert "model_runner.py" in answer.stderr
        assert bed.status()["state"]["state"] == "foreign-edit"
        assert bed.facts() == before
        path.write_bytes(ours)
        if len(commands) == 1:
            assert bed.apply().code == 0
    assert bed.rollback().code == 0
    assert bed.is_original()


def test_both_files_are_shown_and_their_bytecode_goes(bed: Bed) -> None:
    """Plan, diff and history name both; no stale .pyc of what was replaced is left."""
    caches = [path.parent / "__pycache__" for path in (bed.fake.topk, bed.fake.runner)]
    for folder, name in zip(caches, ("topk", "model_runner"), strict=True):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.cpython-312.pyc").write_bytes(b"stale")
    planned = bed.surgeon("apply", "oea", "--dry-run", "--json").result
    for text in ("srt/layers/moe/topk.py", "srt/model_executor/model_runner.py"):
        assert f"--- a/{str(bed.fake.package / text).lstrip('/')}" in planned["diff"]
    assert planned["gate"] == {"by": "forward-mode", "why": ""}
    assert bed.apply().code == 0
    assert [list(folder.iterdir()) for folder in caches] == [[], []]
    changed = bed.surgeon("diff", "--json").result
    assert [one["path"] for one in changed["files"] if one["diff"]] == [str(bed.fake.topk), str(bed.fake.runner)]
    (revision,) = bed.surgeon("history", "--json").result["revisions"]
    assert {str(bed.fake.topk), str(bed.fake.runner)} < {one["path"] for one in revision["files"]}


def test_a_model_runner_of_another_installation_is_left_to_it(bed: Bed) -> None:
    """The package was replaced: the new file is not overwritten by an old original, and the state says so."""
    assert bed.apply().code == 0
    bed.fake.runner.write_bytes(bed.original_runner)
    status = bed.status()["state"]
    assert status["state"] == "reinstalled"
    assert "model_runner.py" in status["why"]
    assert bed.apply().code == 0
    assert bed.is_patched()
