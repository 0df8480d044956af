"""Surgery on topk.py as real sglang releases ship it."""

from __future__ import annotations

import ast
import difflib
import functools
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from surgeon.errors import DoesNotFitError
from surgeon.surgery import (
    FORWARD,
    AlreadyGrafted,
    Found,
    Grafted,
    GraftSpec,
    NotFound,
    graft,
    locate,
    ungraft,
    unified_diff,
)
from surgeon.surgery.locate import _locate
from surgeon.surgery.parse import parse
from tests.support.wheels import Wild, arguments_of, caller_locals, definition, member, runnable

pytestmark = pytest.mark.wheels

WANTS = (
    *("top_k", "renormalize", "use_grouped_topk", "correction_bias", "dynamic_expert_bias", "scoring_func"),
    *("num_expert_group", "topk_group", "num_fused_shared_experts", "num_shared_topk_slots"),
    *("custom_routing_function", "routed_scaling_factor", "apply_routed_scaling_factor_on_output"),
    *("expert_location_dispatch_info", "num_token_non_padded", "packed_topk", "routing_overridden", "layer_id"),
)
SPEC = GraftSpec("oea", "0.1.0", "0123456789ab", wants=WANTS)

# The releases at the edges of the families, the recipe that must fit, and the wanted names that are *not* bound there.
EDGES = {
    "0.4.9.post2": (
        "before-recorder",
        {"dynamic_expert_bias", "scoring_func", "num_shared_topk_slots", "packed_topk", "routing_overridden"}
        | {"apply_routed_scaling_factor_on_output", "layer_id"},
    ),
    "0.5.1": (
        "before-recorder",
        {
            "dynamic_expert_bias",
            "scoring_func",
            "num_shared_topk_slots",
            "packed_topk",
            "routing_overridden",
            "layer_id",
        },
    ),
    "0.5.5": (
        "before-recorder",
        {
            "dynamic_expert_bias",
            "scoring_func",
            "num_shared_topk_slots",
            "packed_topk",
            "routing_overridden",
            "layer_id",
        },
    ),
    "0.5.9": (
        "before-recorder",
        {"dynamic_expert_bias", "num_shared_topk_slots", "packed_topk", "routing_overridden"},
    ),
    "0.5.10": (
        "before-post-process",
        {"dynamic_expert_bias", "num_shared_topk_slots", "packed_topk", "routing_overridden"},
    ),
    "0.5.13": ("before-post-process", {"dynamic_expert_bias", "num_shared_topk_slots", "routing_overridden"}),
    "0.5.17": ("before-post-process", {"dynamic_expert_bias", "num_shared_topk_slots", "routing_overridden"}),
    "0.5.21": ("before-post-process", {"num_shared_topk_slots"}),
    "0.5.23": ("before-post-process", {"num_fused_shared_experts"}),
}
edges = pytest.mark.parametrize("version", EDGES)


@functools.cache
def grafted_in(version: str) -> Grafted:
    """One release's topk.py with the graft in."""
    return graft(member(version), SPEC)


@edges
def test_the_recipe_of_the_release_fits_at_the_anchor(version: str) -> None:
    """Each family is found by its own recipe, at the line that Python's own parser gives for the anchor."""
    source = member(version)
    site = grafted_in(version).site
    callee = {"before-recorder": "on_select_experts", "before-post-process": "_post_process_topk_ids"}[
        EDGES[version][0]
    ]
    (anchor,) = [
        statement.lineno for statement in definition(source, "select_experts").body if callee in ast.dump(statement)
    ][:1]
    assert (site.recipe, site.line) == (EDGES[version][0], anchor)


@edges
def test_exactly_the_bound_names_are_passed(version: str) -> None:
    """The call passes every wanted name that the release has at the site, and no other."""
    grafted = grafted_in(version)
    assert grafted.spec.wants == tuple(name for name in WANTS if name not in EDGES[version][1])


@edges
def test_the_grafted_function_runs_and_routes(version: str) -> None:
    """Run on random branches with all around it stubbed, the call gets its arguments and its answer is what goes on.

    The names that `locate` calls bound are exactly those that were there in every run.
    """
    grafted = grafted_in(version)
    names, calls = None, 0
    for seed in range(400):
        seen = _run(grafted.result, seed)
        if seen is None:
            continue
        calls += 1
        assert list(seen["passed"]) == list(grafted.spec.wants)
        assert all(seen["locals"][name] is value for name, value in seen["passed"].items())
        assert seen["next"] == ("new ids", "new weights")
        names = set(seen["locals"]) if names is None else names & set(seen["locals"])
    assert calls > 50
    assert names == set(grafted.site.bound)


def _run(source: bytes, seed: int, *, active: bool = True) -> dict[str, Any] | None:
    coin = random.Random(seed)  # noqa: S311 - a reproducible choice of branches
    seen: dict[str, Any] = {}

    def route(weights: object, ids: object, logits: object, **passed: object) -> tuple[str, str]:
        seen.update(passed=passed, locals=caller_locals())
        assert weights is seen["locals"]["topk_weights"]
        assert ids is seen["locals"]["topk_ids"]
        assert logits is seen["locals"]["router_logits"]
        return "new weights", "new ids"

    def post_process(*, topk_ids: object, topk_weights: object, **_: object) -> object:
        seen["next"] = (topk_ids, topk_weights)
        raise _Done

    class Recorder:
        def on_select_experts(self, *, topk_ids: object) -> None:
            seen["next"] = (topk_ids, caller_locals()["topk_weights"])
            raise _Done

    known = {
        "_surgeon_oea": SimpleNamespace(active=active, route=route),
        "_post_process_topk_ids": post_process,
        "get_global_expert_distribution_recorder": Recorder,
    }
    function = runnable(source, {"select_experts"}, coin, known).select_experts
    try:
        function(**arguments_of(function, coin))
    except _Done:
        return seen
    except (AssertionError, ValueError):
        # An assertion or a check of sglang's own: these branches do not go together. The site was not reached.
        assert not seen
        return None
    pytest.fail("select_experts ended without passing on what it selected")


class _Done(Exception):  # noqa: N818 - ends a run
    pass


@edges
def test_switched_off_the_call_does_not_happen(version: str) -> None:
    """With the flag off, the runtime's function is not called and what was selected goes on as it is."""
    grafted = grafted_in(version)
    reached = [seen for seen in (_run(grafted.result, seed, active=False) for seed in range(100)) if seen is not None]
    assert len(reached) > 10
    assert all(isinstance(ids, Wild) and isinstance(weights, Wild) for ids, weights in (s["next"] for s in reached))


@edges
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


@edges
def test_ungraft_gives_the_original_bytes(version: str) -> None:
    """Taking the graft out gives back what the wheel ships."""
    assert ungraft(grafted_in(version).result) == member(version)


@edges
def test_a_grafted_file_says_so(version: str) -> None:
    """Locate recognises its own work, with patch, version, stamp and lines, and graft refuses to do it twice."""
    grafted = grafted_in(version)
    outcome = locate(grafted.result)
    assert outcome == AlreadyGrafted("oea", "0.1.0", "0123456789ab", grafted.spec.wants, grafted.inserted, "")
    with pytest.raises(DoesNotFitError, match=r"oea 0\.1\.0") as caught:
        graft(grafted.result, SPEC)
    assert caught.value.code == "already-grafted"


@edges
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


def test_a_release_before_the_first_family_is_refused_with_what_is_there() -> None:
    """0.4.6 calls its recorder differently; the refusal shows that line."""
    outcome = locate(member("0.4.6"))
    assert isinstance(outcome, NotFound)
    assert any("record_new_token" in line.text for line in outcome.nearest)
    for line in outcome.nearest:
        assert member("0.4.6").decode().splitlines()[line.number - 1] == line.text


def test_locate_graft_and_diff_are_quick() -> None:
    """On the longest topk.py there is, the three together stay well under two seconds of processor time."""
    source = member("0.5.23")
    parse.cache_clear()
    _locate.cache_clear()
    start = time.process_time()
    assert "_surgeon_oea.route(" in unified_diff(source, graft(source, SPEC).result, "topk.py")
    assert time.process_time() - start < 1.5
