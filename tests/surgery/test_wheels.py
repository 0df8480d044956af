"""Surgery on files as real sglang releases ship them, beside what tests/surgery/test_matrix.py asks of each."""

from __future__ import annotations

import ast
import difflib
import functools

import pytest

from surgeon.errors import DoesNotFitError
from surgeon.surgery import FORWARD, AlreadyGrafted, Found, Grafted, GraftSpec, NotFound, graft, locate, ungraft
from tests.support.sandbox import run_select_experts
from tests.support.wheels import definition, member

pytestmark = pytest.mark.wheels

WANTS = (
    *("top_k", "renormalize", "use_grouped_topk", "correction_bias", "dynamic_expert_bias", "scoring_func"),
    *("num_expert_group", "topk_group", "num_fused_shared_experts", "num_shared_topk_slots"),
    *("custom_routing_function", "routed_scaling_factor", "apply_routed_scaling_factor_on_output"),
    *("expert_location_dispatch_info", "num_token_non_padded", "packed_topk", "routing_overridden", "layer_id"),
)
SPEC = GraftSpec("oea", "0.1.0", "0123456789ab", wants=WANTS)

# The releases at the edges of the families, and the wanted names that are *not* bound there.
LATE = {"scoring_func", "layer_id", "packed_topk", "dynamic_expert_bias", "routing_overridden", "num_shared_topk_slots"}
MISSING = {
    "0.4.6": LATE
    | {"apply_routed_scaling_factor_on_output", "num_fused_shared_experts"}
    | {"expert_location_dispatch_info", "num_token_non_padded"},
    "0.4.6.post5": LATE | {"apply_routed_scaling_factor_on_output", "num_fused_shared_experts"},
    "0.4.9.post2": LATE | {"apply_routed_scaling_factor_on_output"},
    "0.5.1": LATE,
    "0.5.9": LATE - {"scoring_func", "layer_id"},
    "0.5.10": LATE - {"scoring_func", "layer_id"},
    "0.5.13": {"dynamic_expert_bias", "num_shared_topk_slots", "routing_overridden"},
    "0.5.21": {"num_shared_topk_slots"},
    "0.5.23": {"num_fused_shared_experts"},
}
FAMILIES = ("0.4.6", "0.5.9", "0.5.23")
families = pytest.mark.parametrize("version", FAMILIES)


@functools.cache
def grafted_in(version: str) -> Grafted:
    """One release's topk.py with the graft in."""
    return graft(member(version), SPEC)


@pytest.mark.parametrize("version", MISSING)
def test_exactly_the_bound_names_are_passed(version: str) -> None:
    """The call passes every wanted name that the release has at the site, and no other."""
    assert grafted_in(version).spec.wants == tuple(name for name in WANTS if name not in MISSING[version])


@families
def test_no_bound_name_is_missed(version: str) -> None:
    """The names that `locate` calls bound are exactly those that were there in every one of many runs."""
    runs = [seen for seed in range(200) if (seen := run_select_experts(grafted_in(version).result, seed)) is not None]
    assert len(runs) > 50
    assert set.intersection(*(set(seen.names) for seen in runs)) == set(grafted_in(version).site.bound)


@families
def test_only_whole_lines_are_added(version: str) -> None:
    """difflib, which knows nothing of the graft, sees additions only, and exactly the lines the graft says."""
    grafted = grafted_in(version)
    before, after = grafted.source.split(b"\n"), grafted.result.split(b"\n")
    matcher = difflib.SequenceMatcher(None, [str(x) for x in before], [str(x) for x in after], autojunk=False)
    changes = [step for step in matcher.get_opcodes() if step[0] != "equal"]
    assert [step[0] for step in changes] == ["insert", "insert"]
    assert sum(end - start for _, _, _, start, end in changes) == sum(len(block) for block in grafted.inserted)
    for block in grafted.inserted:
        del after[block.start - 1 : block.stop - 1]
        after[block.start - 1 : block.start - 1] = [b"\0"] * len(block)
    assert [line for line in after if line != b"\0"] == before


@families
def test_a_grafted_file_says_so(version: str) -> None:
    """Locate recognises its own work, with patch, version, stamp and lines, and graft refuses to do it twice."""
    grafted = grafted_in(version)
    outcome = locate(grafted.result)
    assert outcome == AlreadyGrafted("oea", "0.1.0", "0123456789ab", grafted.spec.wants, grafted.inserted, "")
    with pytest.raises(DoesNotFitError, match=r"oea 0\.1\.0") as caught:
        graft(grafted.result, SPEC)
    assert caught.value.code == "already-grafted"


@families
def test_a_pass_is_announced_before_anything_else(version: str) -> None:
    """In every family, ModelRunner.forward is there once, plain, and takes the batch first; the call is its first."""
    spec = GraftSpec("oea", "0.1.0", "0123456789ab", function="announce", place=FORWARD)
    source = member(version, f"sglang/{FORWARD.file}")
    grafted = graft(source, spec)
    assert ungraft(grafted.result) == source
    (before, after) = (_method(text, "ModelRunner", "forward") for text in (source, grafted.result))
    assert before.decorator_list == []
    assert [argument.arg for argument in before.args.args][:2] == ["self", "forward_batch"]
    assert ast.unparse(after.body[0]) == "if _surgeon_oea.active:\n    _surgeon_oea.announce(self, forward_batch)"
    assert [ast.dump(node) for node in after.body[1:]] == [ast.dump(node) for node in before.body]
    assert grafted.site.line == before.body[0].lineno
    assert grafted.site.bound == {argument.arg for argument in before.args.args}
    assert not isinstance(locate(source), Found)


def _method(source: bytes, owner: str, name: str) -> ast.FunctionDef:
    (node,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == owner]
    (found,) = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == name]
    return found


def test_a_release_without_a_recipe_is_refused_with_what_is_there() -> None:
    """Were the recorder of 0.4.6 called otherwise, the refusal would show the line."""
    unknown = member("0.4.6").replace(b"record_new_token(", b"note_tokens(")
    outcome = locate(unknown)
    assert isinstance(outcome, NotFound)
    assert any("note_tokens" in line.text for line in outcome.nearest)
    for line in outcome.nearest:
        assert unknown.decode().splitlines()[line.number - 1] == line.text


@pytest.mark.parametrize("decorator", ["@torch.compile(dynamic=True)", "@maybe_torch_compile"])
def test_a_release_that_compiled_the_function_would_be_refused(decorator: str) -> None:
    """Were select_experts itself compiled, as functions below it are, the refusal would say so."""
    line = definition(member("0.5.23"), "select_experts").lineno - 1
    lines = member("0.5.23").decode().split("\n")
    outcome = locate("\n".join([*lines[:line], decorator, *lines[line:]]).encode())
    assert isinstance(outcome, NotFound)
    assert f"is compiled, by `{decorator[1:]}`" in outcome.reason
