"""What recording relies on, in real sglang: the recorder's files, endpoints and modes, from 0.4.9.post2 to 0.5.23."""

from __future__ import annotations

import ast
import re

import pytest

from surgeon.bench import recording
from surgeon.operations import record
from tests.support.wheels import member

pytestmark = pytest.mark.wheels

RELEASES = ("0.4.9.post2", "0.5.1", "0.5.9", "0.5.17", "0.5.21", "0.5.23")
releases = pytest.mark.parametrize("version", RELEASES)


def text(version: str, path: str) -> str:
    """A module of a release."""
    return member(version, f"sglang/srt/{path}").decode()


@releases
def test_the_files_have_the_names_and_keys_that_are_looked_for(version: str) -> None:
    """Two patterns of names, both of which the look on the node takes; and the keys that are read."""
    source = text(version, "eplb/expert_distribution.py")
    patterns = re.findall(r'_dump_to_file\(\s*f"(expert_distribution_recorder_[^"]*)"', source)
    assert sorted(patterns) == [
        "expert_distribution_recorder_{time.time()}.pt",
        "expert_distribution_recorder_{time.time()}_{self._rank}.pt",
    ]
    (looked_for,) = re.findall(r'fullmatch\(r"(expert_distribution[^"]*)"', record.LOOK)
    found = set()
    for one in patterns:
        match = re.fullmatch(looked_for, one.replace("{time.time()}", "1764585599.25").replace("{self._rank}", "3"))
        assert match is not None, one
        found.add(match.groups())
    assert found == {("1764585599.25", "3"), ("1764585599.25", None)}
    for key in ("records=self._records", "global_physical_count=", "forward_pass_id=", "logical_count=", "input_ids="):
        assert key in source, key


@releases
def test_decode_has_the_number_that_is_looked_for(version: str) -> None:
    """The second member of ForwardMode, which counts from 1."""
    tree = ast.parse(text(version, "model_executor/forward_batch_info.py"))
    (mode,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "ForwardMode")
    members = [
        one.targets[0].id for one in mode.body if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    ]
    assert members.index("DECODE") + 1 == recording._DECODE_MODE


@releases
def test_the_endpoints_are_there_and_raise_where_the_recorder_is_off(version: str) -> None:
    """Which is why they are not called then; the handler in the scheduler catches nothing."""
    server = text(version, "entrypoints/http_server.py")
    for path in record._PATHS.values():
        assert f'"{path}", methods=["GET", "POST"]' in server
    source = text(version, "eplb/expert_distribution.py")
    off = source.split("def _on_not_implemented", 1)[1].split("class ", 1)[0]
    assert "raise Exception" in off
    assert "expert_distribution_recorder_mode" in off


@releases
def test_fused_shared_experts_are_counted_inside_from_0_5_21_on(version: str) -> None:
    """Before, only -1 was masked out."""
    source = text(version, "eplb/expert_distribution.py")
    body = source.split("class _SelectExpertsSinglePassGatherer", 1)[1].split("\nclass ", 1)[0]
    bounded = "num_physical_experts" in body
    assert bounded == record._bounded(version)
    assert bounded or "topk_ids != -1" in body
