"""Whether sglang does it itself: what counts as a sign, and what only looks like one."""

from __future__ import annotations

import pytest

from surgeon.errors import DoesNotFitError
from surgeon.surgery import FORWARD, AlreadyGrafted, Found, GraftSpec, NotNeeded, graft, locate

PLAIN = """@dataclass
class TopKConfig:
    top_k: int
    renormalize: bool = True


def select_experts(hidden_states, router_logits, topk_config):
    topk_weights, topk_ids = fused_topk(hidden_states, router_logits, topk_config.top_k)
    recorder().on_select_experts(topk_ids=topk_ids)
    return StandardTopKOutput(topk_weights, topk_ids, router_logits)
"""
ANCHOR = "    recorder().on_select_experts"
MASKED = """    own = topk_ids[:, :topk_config.k0]
    member = torch.zeros_like(router_logits, dtype=torch.bool).scatter_(1, own, True)
    base = member.any(dim=0)
    scores = router_logits.masked_fill(~base, float("-inf"))
    topk_weights, topk_ids = torch.topk(scores, topk_config.top_k, dim=-1)
"""
MARKED = """    used = torch.zeros(router_logits.shape[-1], dtype=torch.bool)
    used[topk_ids[:, :2].flatten()] = True
    picked = torch.where(used, router_logits, floor).topk(topk_config.top_k)
    topk_weights, topk_ids = picked
"""
IN_PLACE = """    member = torch.zeros_like(router_logits)
    member.scatter_(1, topk_ids, 1)
    union = torch.amax(member, 0) > 0
    scores = torch.softmax(router_logits, -1) * union
    new_ids = torch.topk(scores, 8).indices
    topk_ids = new_ids.to(torch.int32)
"""
DISTINCT = """    loaded = torch.unique(topk_ids)
    for _ in range(1):
        choice = router_logits[:, loaded].topk(8, dim=-1)
        topk_ids = loaded[choice.indices]
"""
WITHIN_A_ROW = """    groups = torch.zeros_like(router_logits).scatter_(1, topk_ids, 1)
    topk_ids = router_logits.masked_fill(groups.sum(dim=-1) == 0, 0).topk(8).indices
"""


@pytest.mark.parametrize(
    ("source", "name", "line"),
    [
        (
            PLAIN.replace("    top_k: int\n", "    top_k: int\n    oea_k0: int = 0\n"),
            "`oea_k0`, a field of `TopKConfig`",
            4,
        ),
        (
            PLAIN.replace("renormalize", "enable_batch_aware_routing"),
            "`enable_batch_aware_routing`, a field of `TopKConfig`",
            4,
        ),
        (PLAIN.replace("topk_config)", "topk_config, opportunistic_experts=False)", 1), "a parameter of", 7),
        (
            PLAIN.replace(ANCHOR, f"    if get_global_server_args().enable_oea:\n        pass\n{ANCHOR}"),
            "`enable_oea`",
            9,
        ),
        (PLAIN.replace(ANCHOR, f'    k0 = server_args["piggyback_topk"]\n{ANCHOR}'), "`piggyback_topk`, read in", 9),
        (PLAIN.replace("fused_topk(h", "OpportunisticTopK(h"), "`OpportunisticTopK`, read in `select_experts`", 8),
    ],
)
def test_a_name_that_says_so_is_a_sign(source: str, name: str, line: int) -> None:
    """An option or a function named after the method, where it is declared or read, with its line."""
    outcome = locate(source.encode())
    assert isinstance(outcome, NotNeeded)
    assert name in outcome.reason
    assert [shown.number for shown in outcome.lines] == [line]
    assert source.splitlines()[line - 1] == outcome.lines[0].text


@pytest.mark.parametrize("body", [MASKED, MARKED, IN_PLACE, DISTINCT])
def test_a_second_choice_out_of_the_batchs_experts_is_a_sign(body: str) -> None:
    """However it is written: chosen experts, brought together over the rows, limit a second top-k."""
    source = PLAIN.replace(ANCHOR, body + ANCHOR)
    outcome = locate(source.encode())
    assert isinstance(outcome, NotNeeded)
    assert "in `select_experts` the chosen experts are brought together over the rows" in outcome.reason
    assert len(outcome.lines) == 2
    with pytest.raises(DoesNotFitError, match="not needed") as caught:
        graft(source.encode(), GraftSpec("oea", "0.1.0", "0123456789ab"))
    assert caught.value.code == "not-needed"
    assert caught.value.exit_code == 4


def test_a_function_that_select_experts_calls_counts_as_well() -> None:
    """Upstream would hardly write it all into one function."""
    helper = f"def reroute(router_logits, topk_ids, topk_config):\n{MASKED}    return topk_weights, topk_ids\n\n\n"
    calling = PLAIN.replace(
        ANCHOR, f"    topk_weights, topk_ids = reroute(router_logits, topk_ids, topk_config)\n{ANCHOR}"
    )
    outcome = locate((helper + calling).encode())
    assert isinstance(outcome, NotNeeded)
    assert "in `reroute`" in outcome.reason
    assert isinstance(locate((helper + PLAIN).encode()), Found)


@pytest.mark.parametrize(
    "body",
    [
        "    # opportunistic_experts, oea_k0 and batch-aware routing are for another day: see unique(topk_ids)\n",
        "    opportunistic_prefetch(topk_ids)\n",
        "    load = torch.bincount(topk_ids.flatten())\n    log_balance(load)\n",
        "    load = topk_ids.sum(dim=0)\n    topk_ids = replicas[topk_ids, load.topk(1).indices]\n",
        "    load = torch.bincount(topk_ids.flatten())\n    topk_ids = (copies + load[topk_ids]).topk(1).indices\n",
        WITHIN_A_ROW,
        "    most = router_logits.max(0)\n    topk_ids = (router_logits - most).topk(8).indices\n",
    ],
)
def test_what_only_looks_like_it_is_none(body: str) -> None:
    """Comments, other opportunities, statistics of the load, physical copies, limits within a row, plain scores."""
    assert not isinstance(locate(PLAIN.replace(ANCHOR, body + ANCHOR).encode()), NotNeeded)


def test_surgeons_own_name_is_none() -> None:
    """A graft of ours, marked or made by hand, is not upstream's work."""
    by_hand = PLAIN.replace(ANCHOR, f"    topk_ids = _surgeon_oea.route(topk_ids)\n{ANCHOR}")
    assert not isinstance(locate(by_hand.encode()), NotNeeded)
    ours = graft(PLAIN.encode(), GraftSpec("oea", "0.1.0", "0123456789ab")).result
    assert isinstance(locate(ours), AlreadyGrafted)


def test_the_signs_are_of_the_routing_only() -> None:
    """A runner that counts distinct requests needs its announcement all the same."""
    runner = (
        "class ModelRunner:\n    def forward(self, forward_batch):\n        oea = torch.unique(forward_batch.ids)\n"
    )
    assert isinstance(locate(runner.encode(), FORWARD), Found)
