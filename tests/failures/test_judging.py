"""It is found, and the patch must not or need not go in: the file, the model, the environment, the state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.bed import make_bed, topk
from tests.support.packages import install_companions

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.bed import Bed


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"def select_experts(:\n    pass\n", ("does not parse",)),
        (b"import this\n\n\ndef route_tokens(hidden_states):\n    return hidden_states\n", ("select_experts",)),
        (
            b"class TopKConfig:\n    oea_k0: int = 0\n\n\ndef select_experts(router_logits, topk_config):\n    pass\n",
            ("not needed", "`oea_k0`, a field of `TopKConfig`"),
        ),
    ],
    ids=["unparsable", "no-site", "not-needed"],
)
def test_a_topk_that_offers_no_place_is_refused_with_what_was_expected(
    tmp_path: Path, source: bytes, words: tuple[str, ...]
) -> None:
    """A file that does not parse, one without the function, one that does it itself: exit 4, and the bytes stay."""
    with make_bed(tmp_path / "bed", source=source) as bed:
        before = bed.facts()
        answer = bed.apply()
        assert answer.code == 4, answer
        for word in (*words, "topk.py"):
            assert word in answer.stderr
        assert bed.facts() == before


def test_what_is_applied_already_is_left_alone_and_said(serving: Bed) -> None:
    """Exit 0 the second time: no new revision, no restart."""
    assert serving.apply("--k0", "4").code == 0
    before = serving.facts()
    answer = serving.apply("--k0", "4")
    assert answer.code == 0
    assert "already applied: revision 1, k0 = 4" in answer.stdout
    assert serving.facts() == before


def test_a_dry_run_tells_by_its_exit_code_whether_there_is_something_to_do(bed: Bed) -> None:
    """0 for what is there already, 10 for changes that are pending; nothing is written either way."""
    assert bed.apply("--k0", "4").code == 0
    before = bed.facts()
    assert bed.apply("--k0", "4", "--dry-run", "--exit-code").code == 0
    assert bed.apply("--k0", "5", "--dry-run", "--exit-code").code == 10
    assert bed.facts() == before


def test_a_rollback_of_nothing_is_no_failure(serving: Bed) -> None:
    """Exit 0: the files are as they were installed."""
    before = serving.facts()
    answer = serving.rollback()
    assert answer.code == 0
    assert "nothing to roll back: the package's files are as they were installed" in answer.stdout
    assert serving.facts() == before


def test_a_k0_outside_the_models_k_says_which_k_and_where_it_was_read(serving: Bed) -> None:
    """The model's own config decides; exit 2."""
    before = serving.facts()
    answer = serving.apply("--k0", "9")
    assert answer.code == 2
    assert "k0 is 9; expected 1..8: this model uses k = 8 experts per token" in answer.stderr
    assert f"num_experts_per_tok in {serving.fake.model}/config.json" in answer.stderr
    assert serving.facts() == before


@pytest.mark.parametrize("k0", ["0", "-1", "65", "four"])
def test_a_k0_that_no_model_could_have_is_refused_before_the_node_is_asked(bed: Bed, k0: str) -> None:
    """The patch's own range is known here: no connection is made, or the exit code would be 3."""
    bed.configure(host="no-such-node")
    answer = bed.apply("--k0", k0)
    assert answer.code == 2
    assert "k0" in answer.stderr


def test_a_foreign_edit_is_never_overwritten(serving: Bed) -> None:
    """Somebody's debug line in topk.py: exit 8, and their edit stays."""
    edited = topk() + b"\nprint('here')\n"
    serving.fake.topk.write_bytes(edited)
    before = serving.facts()
    answer = serving.apply()
    assert answer.code == 8
    assert "neither what the package's RECORD says nor anything that this node's ledger knows" in answer.stderr
    assert "surgeon diff" in answer.stderr
    assert serving.facts() == before


def test_an_edit_on_top_of_the_patch_stops_apply_and_rollback_alike(bed: Bed) -> None:
    """Neither may throw away what somebody wrote after surgeon, in the file or in the runtime beside it."""
    assert bed.apply().code == 0
    for name, commands in (("topk.py", [bed.rollback, bed.apply]), ("_surgeon_oea.py", [bed.rollback])):
        path = bed.moe / name
        ours = path.read_bytes()
        path.write_bytes(ours + b"\n# mine\n")
        before = bed.facts()
        for command in commands:
            answer = command()
            assert answer.code == 8, answer
            assert name in answer.stderr
        assert bed.facts() == before
        path.write_bytes(ours)


def test_an_environment_that_could_not_start_again_is_not_restarted(serving: Bed) -> None:
    """The running server is fine, its transformers is not any more: exit 5 before anything is touched."""
    install_companions(serving.fake.site, transformers="4.30.0", knows=())
    before = serving.facts()
    answer = serving.apply()
    assert answer.code == 5
    assert "the environment has drifted; a restart would fail" in answer.stderr
    assert "cannot build the config" in answer.stderr
    assert serving.facts() == before
    assert serving.serves()


def test_an_override_in_the_servers_environment_is_found_before_the_write(bed: Bed) -> None:
    """SGLANG_OEA_K0 would win over the file, so the k0 that was asked for could not take effect: exit 4."""
    bed.fake.environ["SGLANG_OEA_K0"] = "6"
    bed.fake.start()
    before = bed.facts()
    answer = bed.apply("--k0", "4")
    assert answer.code == 4
    assert "SGLANG_OEA_K0=6, which overrides k0 = 4" in answer.stderr
    assert bed.facts() == before


def test_a_supervised_server_is_refused_before_the_write(bed: Bed) -> None:
    """Its supervisor would bring it back in between; the message has the supervisor's own command."""
    keeper = bed.fake.root / "supervisord"
    keeper.write_text('#!/bin/sh\n"$@" >> "$LOG" 2>&1 </dev/null &\necho $!\nwait\n', encoding="utf-8")
    keeper.chmod(0o755)
    bed.fake.start(script=f"'{keeper}' \"$@\" > '{bed.fake.root}/pid' & sleep 0.5; cat '{bed.fake.root}/pid'")
    before = bed.facts()
    for answer in (bed.apply(), bed.restart()):
        assert answer.code == 4
        assert "is kept by supervisord" in answer.stderr
        assert "supervisorctl restart" in answer.stderr
        assert bed.facts() == before


def test_a_revision_that_never_was_cannot_be_returned_to(serving: Bed) -> None:
    """Exit 2, with those that can be."""
    before = serving.facts()
    answer = serving.rollback("7")
    assert answer.code == 2
    assert "revision 7 is not one that can be returned to" in answer.stderr
    assert serving.facts() == before


def test_json_without_yes_only_plans(serving: Bed) -> None:
    """A program that forgets --yes changes nothing."""
    before = serving.facts()
    answer = serving.surgeon("apply", "oea", "--json")
    assert answer.code == 0
    assert answer.result["status"] == "planned"
    assert serving.facts() == before
