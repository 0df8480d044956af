"""The routing operator: one batch of top-k choices in, the batch-aware choice out. Pure tensors, torch alone.

surgeon puts this file beside ``_surgeon_oea.py`` as ``_surgeon_oea_operator.py``. :func:`reroute` is both what runs
where there is no GPU and the specification that the Triton form (``_surgeon_oea_kernel.py``) is held against: same
arguments, same results, ids exactly. It covers simplified OEA and its general form (arXiv 2511.02237, Algorithms 1
and 2) and the policies that fill a budget of experts (XShare, arXiv 2602.07265; DES-Vote, arXiv 2602.00879).

All shapes are static and nothing is read back to the host, so a CUDA graph can capture it. What may change while a
captured graph is in use stands in a tensor, the policy tensor; what may not is a :class:`Rule`. Python 3.8 or later.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import torch

# ---------------------------------------------------------------- the policy tensor

# int64 [POLICY_SIZE]; each name is an index.
REFILL = 0  # NATIVE, STRICT or NONE
DENOMINATOR = 1  # KEPT or NATIVE_TOPK
MASS = 2  # p in units of 1 / MASS_ONE; MASS_ONE or more is no limit
MAX_RANK = 3  # refill takes a row's experts of rank below this (0 is the best); 0 is no limit
K_MAX = 4  # refill stops at so many experts of a row; 0, or k and more, is k
BUDGET = 5  # experts that the core is filled up to; 0 is the union alone
UTILITY = 6  # OWN_TOPK or ALL: what the budget goes by
SCHEDULE = 8  # here begins the table of k0 by the number of rows that hold tokens: 0, 1, 2 .. MAX_ROWS, and more
MAX_ROWS = 4096
POLICY_SIZE = SCHEDULE + MAX_ROWS + 2

NATIVE, STRICT, NONE = 0, 1, 2
KEPT, NATIVE_TOPK = 0, 1
OWN_TOPK, ALL = 0, 1
UNTOUCHED = -1  # in the table: a pass of so many rows stays as it is

MASS_ONE = 1 << 16
SCORE_ONE = 1 << 24  # fixed point of scores: whatever is summed over experts or rows is a sum of integers
SCORE_MOST = 1 << 10  # scores above are counted as this; softmax and sigmoid end at 1
SHARE_ONE = 1 << 20  # fixed point of a weight that is a share of its row
MOST_EXPERTS = 1 << 12
_AHEAD = 1 << 45  # added to an order key, puts it before all that lack it
_EPSILON = 1e-20  # what sglang adds to the sum it renormalises by, from 0.5.17 on


class Policy(NamedTuple):
    """What the policy tensor says, in words; defaults are simplified OEA.

    Attributes:
        schedule: ranges (low, high, k0) of the number of rows that hold tokens, both ends included; passes of other
            sizes stay as they are. A k0 of 0 leaves the choice to the budget, and without one is UNTOUCHED too.
        refill: ``native``, ``strict`` or ``none``.
        denominator: ``kept`` or ``native_topk``.
        p: a row keeps no more of its own than reach this share of its scores' sum, in (0, 1].
        max_rank: see MAX_RANK.
        k_max: see K_MAX.
        budget: see BUDGET.
        utility: ``own_topk`` or ``all``.
    """

    schedule: Tuple[Tuple[int, int, int], ...]
    refill: str = "native"
    denominator: str = "kept"
    p: float = 1.0
    max_rank: int = 0
    k_max: int = 0
    budget: int = 0
    utility: str = "own_topk"

    @property
    def is_plain(self) -> bool:
        """Whether the mass, the rank limit, the limit of experts and the budget are all off, see :class:`Rule`."""
        return not (self.p < 1.0 or self.max_rank or self.k_max or self.budget)


REFILLS = ("native", "strict", "none")
DENOMINATORS = ("kept", "native_topk")
UTILITIES = ("own_topk", "all")


def pack(policy: Policy) -> List[int]:
    """The numbers of the policy tensor. Of two ranges that overlap the later one holds."""
    numbers = [0] * SCHEDULE + [UNTOUCHED] * (MAX_ROWS + 2)
    numbers[REFILL] = REFILLS.index(policy.refill)
    numbers[DENOMINATOR] = DENOMINATORS.index(policy.denominator)
    numbers[MASS] = max(1, round(policy.p * MASS_ONE))
    numbers[MAX_RANK] = policy.max_rank
    numbers[K_MAX] = policy.k_max
    numbers[BUDGET] = policy.budget
    numbers[UTILITY] = UTILITIES.index(policy.utility)
    for low, high, k0 in policy.schedule:
        for rows in range(low, min(high, MAX_ROWS) + 1):
            numbers[SCHEDULE + rows] = k0 if k0 > 0 or policy.budget > 0 else UNTOUCHED
    return numbers


def untouched() -> List[int]:
    """The numbers of a policy tensor that leaves every pass as it is."""
    return pack(Policy(schedule=()))


# ---------------------------------------------------------------- the operator

SOFTMAX, SIGMOID, SQRTSOFTPLUS = "softmax", "sigmoid", "sqrtsoftplus"


class Rule(NamedTuple):
    """What belongs to the model: Python constants, so that a captured graph and a compiled one hold still.

    Attributes:
        k: routed experts per row.
        scoring: router scores are the logits' ``softmax``, their ``sigmoid``, or ``sqrtsoftplus``.
        renormalize: whether weights are divided by a sum, see :func:`reroute`.
        scale: what weights are multiplied by in the end.
        groups: groups that the experts fall into; 1 where the choice is not limited to groups.
        groups_kept: groups that a row may choose from.
        plain: whether the caller knows that the policy tensor holds no limit of mass, rank or experts and no budget,
            now and whenever the graph that this call is captured into is replayed. The steps for them are then left
            out, which changes no result.
    """

    k: int
    scoring: str = SOFTMAX
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    plain: bool = False


def _order_key(scores: torch.Tensor) -> torch.Tensor:
    """Integers that order as the scores do and are all distinct, the lower id first among equals.

    Top-k promises nothing about ties, and tensor-parallel ranks that break one differently compute different layers.
    With these keys there are none; and what must come first can be put there by adding to the key, which is exact,
    where shifting fp32 scores by a span merges close ones.

    Args:
        scores: fp32 [rows, n], n at most MOST_EXPERTS, without -0.0 (a sum with a score of 0 or more never is).

    Returns:
        int64 [rows, n], of magnitude below 2**44.
    """
    bits = scores.view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return rising.long() * MOST_EXPERTS - torch.arange(scores.shape[1], device=scores.device)


def _allowed_experts(rank_by: torch.Tensor, native: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The experts each row may use in a group-limited model: bool [rows, experts].

    The model keeps the groups with the greatest sum of their two best biased scores (``biased_grouped_topk_impl``),
    or with the greatest score (``grouped_topk_gpu``). The groups that the kernel's own picks lie in come first here:
    that is the same set, and it stays the kernel's where rounding or a tie let the kernel decide otherwise.
    """
    rows, experts = rank_by.shape
    size = experts // rule.groups
    grouped = rank_by.view(rows, rule.groups, size)
    strength = grouped.topk(2, dim=-1).values.sum(-1) if rule.scoring == SIGMOID else grouped.amax(-1)
    used = torch.zeros_like(strength, dtype=torch.bool).scatter(1, native // size, value=True)
    kept = (_order_key(strength) + _AHEAD * used).topk(rule.groups_kept, dim=1).indices
    mask = torch.zeros_like(used).scatter(1, kept, value=True)
    return mask.unsqueeze(2).expand(rows, rule.groups, size).reshape(rows, experts)


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Router scores, fp32 [rows, experts], none below 0."""
    if scoring == SIGMOID:
        return logits.sigmoid()
    if scoring == SQRTSOFTPLUS:
        return torch.nn.functional.softplus(logits).sqrt()
    return logits.softmax(dim=-1)


def _voters(topk_ids: torch.Tensor, scores: torch.Tensor, rank_by: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The rows whose ids and scores are fit to vote, whether they hold a token or not: bool [rows]."""
    experts = scores.shape[1]
    native = topk_ids[:, : rule.k]
    votes = ((native >= 0) & (native < experts)).all(1) & ~rank_by.isnan().any(1)
    if rule.scoring == SQRTSOFTPLUS:
        votes = votes & ~scores.isinf().any(1)
    if topk_ids.shape[1] > rule.k:
        votes = votes & (topk_ids[:, rule.k :] >= experts).all(1)
    return votes


def _union(own: torch.Tensor, protect: torch.Tensor, votes: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What voting rows protect of their own: bool [experts]."""
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, own, protect & votes.unsqueeze(1)).any(0)


def _within_mass(own: torch.Tensor, fixed: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Which of a row's own best it keeps before their share of all its scores reaches p: bool [rows, k]."""
    reached = fixed.gather(1, own).cumsum(1)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    return (p >= MASS_ONE) | (before * MASS_ONE < p * fixed.sum(1, keepdim=True))


def _within_rank(key: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Which experts are among the first so many of their row, by order key: bool [rows, experts]; ranks: [rows, 1]."""
    ordered = key.sort(dim=1, descending=True).values
    return (key >= ordered.gather(1, (ranks - 1).clamp(0, key.shape[1] - 1))) & (ranks > 0)


def _filled(
    core: torch.Tensor,
    own: torch.Tensor,
    counted: torch.Tensor,
    utility: torch.Tensor,
    budget: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """The core, filled up to the budget by what the batch as a whole has most use for: bool [experts].

    Args:
        core: bool [experts].
        own: [rows, k], each row's best.
        counted: fixed-point scores [rows, experts], 0 in rows that do not vote.
        utility: OWN_TOPK or ALL.
        budget: how many experts.
        rule: the constants.
    """
    mine = counted.gather(1, own)
    if rule.renormalize:
        mine = mine * SHARE_ONE // mine.sum(1, keepdim=True).clamp(min=1)
    wanted = torch.zeros_like(counted).scatter(1, own, mine).sum(0)
    use = torch.where(utility == ALL, counted.sum(0), wanted)
    numbers = torch.arange(core.shape[0], device=core.device)
    first = (use * MOST_EXPERTS - numbers + (core.long() << 61)).sort(descending=True).indices
    place = torch.zeros_like(first).scatter(0, first, numbers)
    return core | (place < budget)


def _merged(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, changed: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """What was given, with the routed columns of changed rows replaced."""
    k = ids.shape[1]
    pick = changed.unsqueeze(1)
    new_ids = torch.where(pick, ids.to(topk_ids.dtype), topk_ids[:, :k])
    new_weights = torch.where(pick, weights.to(topk_weights.dtype), topk_weights[:, :k])
    if topk_ids.shape[1] > k:
        new_ids = torch.cat((new_ids, topk_ids[:, k:]), dim=1)
        new_weights = torch.cat((new_weights, topk_weights[:, k:]), dim=1)
    return new_weights, new_ids


def reroute(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    router_logits: torch.Tensor,
    bias: Optional[torch.Tensor],
    policy: torch.Tensor,
    real_rows: Optional[torch.Tensor],
    rule: Rule,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route one batch by what the batch as a whole loads.

    Definitions, all exact:
        score: fp32 of ``rule.scoring`` over the fp32 logits. selection score: score + fp32 bias (score without one).
        fixed: floor(min(score, SCORE_MOST) * SCORE_ONE), an integer.
        order: a row's experts (in a group-limited model: those of its groups, see :func:`_allowed_experts`) from the
            greatest selection score to the least; equal ones by rising id. rank 0 is the best.
        native: the row's first k ids as given. Whatever columns follow are shared experts.
        n: the number of rows that hold tokens: rows, or real_rows if that is less; never below 0.
        k0: ``policy[SCHEDULE + min(n, MAX_ROWS + 1)]``.
        a row votes: if its index is below n, all native ids are in 0..experts-1, all further ids are >= experts, and
            no selection score is NaN (and, of sqrtsoftplus, no score is infinite).

    Steps, for rows that vote:
        1. protect: the first m of the row's order, m = min(k0, c), where c is the least count whose ``fixed`` sum to
           at least p / MASS_ONE of the row's sum over all experts: an expert at rank j is kept if
           sum of fixed[rank < j] * MASS_ONE < p * sum of fixed. With p >= MASS_ONE, m = k0.
        2. core: the union of what is protected over all voting rows. If the budget is greater than that, experts are
           added by utility, equal ones by rising id, until the core holds ``budget`` (or all). Utility, of OWN_TOPK:
           the sum over voting rows of the expert's weight among the first k of that row's order: fixed, and if the
           rule renormalises, floor(fixed * SHARE_ONE / max(1, the sum of these k)). Of ALL: the sum of fixed over
           voting rows.
        3. refill: eligible experts of a row are those of its order that are in core and of rank below
           max(max_rank, m) (max_rank 0: any). limit = max(k_max, m) (k_max 0, or above k: k).
           slots: eligible experts in order; then, unless refill is NATIVE, the other core experts of the row's order;
           then the rest of its order; cut at k. So a row always has k distinct ids.
           kept, the number of leading slots with weight: NATIVE: limit. STRICT: min(limit, eligible).
           NONE: m (pruning: the other slots are experts that the batch loads anyway, where there are such).
        4. weight: the scores of the kept slots, 0 for the others. If the rule renormalises, they are divided by
           (the kept slots' sum + 1e-20), or with NATIVE_TOPK by (the sum of the scores of the native ids + 1e-20).
           Then multiplied by ``rule.scale``. All in fp32.
        5. gate: a row is *changed* if it votes, 0 <= k0 < k, k0 > 0 or budget > 0, kept > 0, and it gains by it: not
           (kept == k and the native ids hold min(k, eligible) eligible ones). All other rows keep weights and ids bit
           for bit, whatever the kernel's order and ties. With NONE, kept = m < k, so every such row is changed.

    Nothing in a row that does not vote influences another row.

    Args:
        topk_weights: [rows, k + shared], what sglang chose; floating.
        topk_ids: [rows, k + shared], int32 or int64, logical expert ids.
        router_logits: [rows, experts], any floating dtype; k <= experts <= MOST_EXPERTS.
        bias: [experts], added to the scores for choosing and never for weighing; or None.
        policy: int64 [POLICY_SIZE], see the indices above.
        real_rows: an integer tensor of one element: how many leading rows hold tokens; or None for all.
        rule: the constants.

    Returns:
        Weights and ids of the same shapes and dtypes, new tensors; and *changed*, bool [rows]. Columns from k on are
        as given.
    """
    rows, experts = router_logits.shape
    k = rule.k
    refill, denominator, mass, max_rank, k_max, budget, utility = policy[: UTILITY + 1].unbind()
    core_first = refill != NATIVE
    scores = _scores(router_logits.float(), rule.scoring)
    rank_by = scores if bias is None else scores + bias.float()
    votes = _voters(topk_ids, scores, rank_by, rule)
    native = topk_ids[:, :k].long().clamp(0, experts - 1)
    if real_rows is None:
        k0 = policy[SCHEDULE + min(rows, MAX_ROWS + 1)]
    else:
        held_rows = real_rows.reshape(1).long().clamp(0, rows)
        votes = votes & (torch.arange(rows, device=topk_ids.device) < held_rows)
        k0 = policy.gather(0, held_rows.clamp(max=MAX_ROWS + 1) + SCHEDULE)

    key = _order_key(rank_by)
    allowed = None
    if rule.groups > 1:
        allowed = _allowed_experts(rank_by, native, rule)
        key = key - 4 * _AHEAD * ~allowed
    own = key.topk(k, dim=1).indices
    slots = torch.arange(k, device=topk_ids.device)
    protect = (slots < k0).expand(rows, k)
    if rule.plain:
        core = _union(own, protect, votes, key)
        in_core = eligible = core.expand(rows, experts) if allowed is None else allowed & core
        protected, limit = k0, torch.full_like(k0, k)
    else:
        fixed = (scores.nan_to_num(0.0).clamp(max=SCORE_MOST) * SCORE_ONE).long()
        protect = protect & _within_mass(own, fixed, mass)
        protected = protect.sum(1, keepdim=True)
        core = _filled(_union(own, protect, votes, key), own, fixed * votes.unsqueeze(1), utility, budget, rule)
        in_core = core.expand(rows, experts) if allowed is None else allowed & core
        eligible = in_core & _within_rank(key, torch.maximum(torch.where(max_rank > 0, max_rank, experts), protected))
        limit = torch.maximum(torch.where((k_max > 0) & (k_max < k), k_max, k), protected)

    reachable = eligible.sum(1, keepdim=True)
    kept = torch.where(refill == STRICT, torch.minimum(limit, reachable), limit)
    kept = torch.where(refill == NONE, protected, kept)
    chosen = (key + 2 * _AHEAD * eligible + _AHEAD * (in_core & core_first)).topk(k, dim=1, sorted=True).indices
    weights = scores.gather(1, chosen).masked_fill(slots >= kept, 0.0)
    if rule.renormalize:
        unmodified = scores.gather(1, native).sum(dim=1, keepdim=True)
        total = torch.where(denominator == NATIVE_TOPK, unmodified, weights.sum(dim=1, keepdim=True))
        weights = weights / (total + _EPSILON)
    if rule.scale != 1.0:
        weights = weights * rule.scale

    held = eligible.gather(1, native).sum(1, keepdim=True)
    gains = (kept != k) | (held != reachable.clamp(max=k))
    applies = (k0 >= 0) & (k0 < k) & ((k0 > 0) | (budget > 0)) & (kept > 0)
    changed = votes & (applies & gains).squeeze(1)
    return (*_merged(topk_weights, topk_ids, weights, chosen, changed), changed)
