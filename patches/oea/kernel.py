"""The routing operator as two Triton launches, whatever the policy: the fused form of ``operator.reroute``.

surgeon puts this file beside ``_surgeon_oea.py`` as ``_surgeon_oea_kernel.py``. ``operator.py`` is the specification:
what it defines is used here by the same names, and :func:`reroute` takes and returns the same. The two agree in every
id when they start from the same scores, and in weights to 1e-6; scores themselves differ by a few units in the last
place, since torch and Triton compute exponentials differently. Each form alone does the same on every rank. This form
has been compiled for GPUs and run in Triton's interpreter; it has never run on a GPU.

Launch 1, a program per row: scores, order, what the row protects, its vote. Launch 2, a program per row: the core out
of all votes, which every program works out for itself, then refill, weights, gate. What passes between them is integers
and the scores, so no order of addition can matter. Everything that depends on the policy tensor or the number of real
rows is decided on the device. One warp a row: a reduction of int32 is then one instruction (``redux.sync``, compute
capability 8.0 on) and needs no barrier. Python 3.8 or later; compiled with Triton 3.3, 3.5 and 3.9. One file, because
Triton looks for what a kernel calls beside it.
"""

# Inside kernels Triton takes an annotation for a name of its own, constants are named in capitals as in Triton's code,
# and a launch is one function with one long list of parameters.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917, PLR0912, PLR0915, PLR2004, C901
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
import triton
import triton.language as tl

# What operator.py lays down; tests compare the two.
_REFILL: Any = tl.constexpr(0)
_DENOMINATOR: Any = tl.constexpr(1)
_MASS: Any = tl.constexpr(2)
_MAX_RANK: Any = tl.constexpr(3)
_K_MAX: Any = tl.constexpr(4)
_BUDGET: Any = tl.constexpr(5)
_UTILITY: Any = tl.constexpr(6)
_SCHEDULE: Any = tl.constexpr(8)
_MAX_ROWS: Any = tl.constexpr(4096)
_STRICT: Any = tl.constexpr(1)
_NONE: Any = tl.constexpr(2)
_NATIVE_TOPK: Any = tl.constexpr(1)
_ALL: Any = tl.constexpr(1)
_MASS_ONE: Any = tl.constexpr(1 << 16)
_SCORE_ONE: Any = tl.constexpr(float(1 << 24))
_SCORE_MOST: Any = tl.constexpr(float(1 << 10))
_SHARE_ONE: Any = tl.constexpr(1 << 20)
_EPSILON: Any = tl.constexpr(1e-20)

_SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
_SIGMOID: Any = tl.constexpr(1)
_SQRTSOFTPLUS: Any = tl.constexpr(2)

WARPS = 1  # of a program, which is one row
MOST_ROWS = 512
MOST_EXPERTS = 512
MOST_COLUMNS = 16
_IDS: Any = tl.constexpr(1 << 12)  # more than any id
_NEVER: Any = tl.constexpr(-(1 << 31))  # the order number of an expert that a row may not use; no score's is that low
_AT_ONCE: Any = tl.constexpr(64)  # votes that launch 2 reads in one go


def unfit(rows: int, experts: int, columns: int, rule: Any) -> Optional[str]:
    """Why this form cannot do a call of these shapes, or None; the torch form does them all.

    Args:
        rows: rows of the call.
        experts: columns of the router logits.
        columns: columns of the ids, shared ones included.
        rule: an ``operator.Rule``.
    """
    if not 0 < rows <= MOST_ROWS:
        return f"{rows} rows, where the kernel takes 1..{MOST_ROWS}"
    if not rule.k <= experts <= MOST_EXPERTS:
        return f"{experts} experts, where the kernel takes {rule.k}..{MOST_EXPERTS}"
    if not 1 <= rule.k <= columns <= MOST_COLUMNS:
        return f"{columns} columns, {rule.k} of them routed, where the kernel takes 1..{MOST_COLUMNS}"
    if rule.scoring not in _SCORINGS:
        return f"scores by {rule.scoring}"
    if experts % rule.groups or rule.groups_kept * (experts // rule.groups) < rule.k:
        return f"{rule.groups} groups that do not fit {experts} experts"
    return None


@triton.jit
def _exp(x):
    """e**x to about two units in the last place; ``tl.exp`` loses as many bits as x has before the point."""
    near = tl.where(x > 89.0, 89.0, tl.where(x < -104.0, -104.0, x))  # a NaN stays one
    steps = tl.floor(near * 1.4426950408889634 + 0.5)
    rest = near - steps * 0.693359375  # exact: the constant has 9 bits
    rest = rest + steps * 2.12194440e-4
    half = tl.floor(steps * 0.5)  # in two factors, since 2**128 is none
    return tl.exp2(rest * 1.4426950408889634) * tl.exp2(half) * tl.exp2(steps - half)


@triton.jit
def _scores(logits, inside, SCORING: tl.constexpr):
    """Router scores; 0 where there is no expert."""
    if SCORING == _SIGMOID:
        scores = 1.0 / (1.0 + _exp(-logits))
    elif SCORING == _SQRTSOFTPLUS:
        power = _exp(logits)
        more = 1.0 + power
        # log(1 + e**x) without losing what 1 + e**x rounds away.
        soft = tl.where(more == 1.0, power, tl.log(more) * (power / (more - 1.0)))
        scores = tl.sqrt(tl.where(logits > 20.0, logits, soft))
    else:
        logits = tl.where(inside, logits, float("-inf"))
        power = _exp(logits - tl.max(logits, 0))
        power = tl.where(inside, power, 0.0)
        scores = power / tl.sum(power, 0)
    return tl.where(inside, scores, 0.0)


@triton.jit
def _rising(value):
    """int32 that orders as fp32 does."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best(order, numbers):
    """The greatest of an int32 vector and the lowest number that has it."""
    top = tl.max(order, 0)
    return top, tl.min(tl.where(order == top, numbers, _IDS), 0)


@triton.jit
def _threshold(key, pool, wanted, BITS: tl.constexpr):
    """The greatest number that at least so many keys of the pool reach; 0 if there are not so many.

    Keys are int64, distinct, from 0 to below 2**BITS.
    """
    found = wanted.to(tl.int64) * 0
    for step in range(BITS):
        tried = found + (tl.full((), 1, tl.int64) << (BITS - 1 - step))
        reach = tl.sum((pool & (key >= tried)).to(tl.int32), 0)
        found = tl.where(reach >= wanted, tried, found)
    return found


@triton.jit
def _pass(policy, real_rows, rows, K: tl.constexpr, COUNTED: tl.constexpr):
    """How many rows hold tokens, k0 for so many, and whether such a pass is touched at all."""
    held = rows
    if COUNTED:
        held = tl.minimum(tl.maximum(tl.load(real_rows).to(tl.int64), 0), rows).to(tl.int32)
    k0 = tl.load(policy + _SCHEDULE + tl.minimum(held, _MAX_ROWS + 1)).to(tl.int32)
    touched = (k0 >= 0) & (k0 < K) & ((k0 > 0) | (tl.load(policy + _BUDGET) > 0))
    return held, k0, touched


@triton.jit
def _groups_allowed(
    rank, numbers, ids, K: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SCORING: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Which experts lie in the groups that the row may choose from; see ``operator._allowed_experts``."""
    group = tl.arange(0, WIDE)
    strength = tl.zeros([WIDE], tl.float32)
    for g in tl.static_range(GROUPS):
        mine = tl.where(numbers // SIZE == g, rank, float("-inf"))
        first = tl.max(mine, 0)
        if SCORING == _SIGMOID:
            at = tl.min(tl.where(mine == first, numbers, _IDS), 0)
            first = first + tl.max(tl.where(numbers == at, float("-inf"), mine), 0)
        strength = tl.where(group == g, first, strength)
    used = tl.zeros([WIDE], tl.int32)
    for j in tl.static_range(K):
        used = tl.where(group == tl.minimum(tl.maximum(tl.load(ids + j).to(tl.int32), 0), EXPERTS - 1) // SIZE, 1, used)
    order = tl.where(group < GROUPS, _rising(strength), _NEVER)
    in_use = tl.sum(used, 0)
    allowed = numbers < 0
    for i in tl.static_range(KEPT):
        # First those that the kernel's picks lie in, then the strongest.
        _, taken = _best(tl.where((used == 1) | (i >= in_use), order, _NEVER), group)
        allowed = allowed | (numbers // SIZE == taken)
        order = tl.where(group == taken, _NEVER, order)
    return allowed


@triton.jit(do_not_specialize=["rows"])  # else each kind of bucket would be compiled for itself
def _vote(
    router_logits, logits_stride, bias, topk_ids, ids_stride, policy, real_rows, rows,
    scores_out, order_out, votes_out, protected_out, utility_out,
    K: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr, PLAIN: tl.constexpr, BIASED: tl.constexpr, COUNTED: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS_WIDTH: tl.constexpr,
):  # fmt: skip
    """Launch 1: scores and order of one row, how many experts it protects (-1: it does not vote), and which."""
    row = tl.program_id(0)
    numbers = tl.arange(0, WIDTH)
    inside = numbers < EXPERTS
    # Before the branch, so that they are on their way while it is decided.
    logits = tl.load(router_logits + row.to(tl.int64) * logits_stride + numbers, mask=inside, other=0.0)
    if BIASED:
        biases = tl.load(bias + numbers, mask=inside, other=0.0)
    held, k0, touched = _pass(policy, real_rows, rows, K, COUNTED)
    if touched & (row < held):
        scores = _scores(logits.to(tl.float32), inside, SCORING)
        rank = scores
        if BIASED:
            rank = scores + biases.to(tl.float32)

        ids = topk_ids + row.to(tl.int64) * ids_stride
        bad = tl.sum((rank != rank).to(tl.int32), 0)  # noqa: PLR0124 - a NaN
        if SCORING == _SQRTSOFTPLUS:
            bad += tl.sum((scores == float("inf")).to(tl.int32), 0)
        for j in tl.static_range(COLUMNS):
            id_ = tl.load(ids + j)
            if j < K:
                bad += ((id_ < 0) | (id_ >= EXPERTS)).to(tl.int32)
            else:
                bad += (id_ < EXPERTS).to(tl.int32)
        votes = bad == 0

        usable = inside
        if GROUPS > 1:
            usable = usable & _groups_allowed(
                rank, numbers, ids, K, EXPERTS // GROUPS, GROUPS, GROUPS_KEPT, SCORING, EXPERTS, GROUPS_WIDTH
            )
        order = tl.where(usable, _rising(rank), _NEVER)
        base = row * EXPERTS
        tl.store(scores_out + base + numbers, scores, mask=inside)
        tl.store(order_out + base + numbers, order, mask=inside)

        left = order
        protected = k0
        if PLAIN:
            for _ in range(k0):
                _, taken = _best(left, numbers)
                left = tl.where(numbers == taken, _NEVER, left)
            kept = left != order
        else:
            number = tl.where(scores < _SCORE_MOST, scores, tl.where(scores >= _SCORE_MOST, _SCORE_MOST, 0.0))  # NaN: 0
            fixed = (number * _SCORE_ONE).to(tl.int64)
            p = tl.load(policy + _MASS)
            total = p * tl.sum(fixed, 0)
            before = total * 0
            protected = 0 * k0
            kept = numbers < 0
            for i in range(K):
                _, taken = _best(left, numbers)
                mine = numbers == taken
                keep = (i < k0) & ((p >= _MASS_ONE) | (before * _MASS_ONE < total))
                protected += keep.to(tl.int32)
                kept = kept | (mine & keep)
                before += tl.sum(tl.where(mine, fixed, 0), 0)
                left = tl.where(mine, _NEVER, left)
            if tl.load(policy + _BUDGET) > 0:
                used = tl.where(left != order, fixed, 0)
                if RENORMALIZE:
                    used = used * _SHARE_ONE // tl.maximum(before, 1)
                used = tl.where(tl.load(policy + _UTILITY) == _ALL, fixed, used)
                tl.store(utility_out + base + numbers, tl.where(votes, used, 0), mask=inside)
        bit = (kept & votes).to(tl.int32) << (numbers % 32)
        words = tl.sum(tl.reshape(bit, (WIDTH // 32, 32)), 1)
        tl.store(votes_out + row * (WIDTH // 32) + tl.arange(0, WIDTH // 32), words)
        tl.store(protected_out + row, tl.where(votes, protected, -1))


@triton.jit
def _or(left, right):
    return left | right


@triton.jit
def _core(votes_in, held, WIDTH: tl.constexpr):
    """The union of what the rows protect: int1 [WIDTH]."""
    rows = tl.arange(0, _AT_ONCE)[:, None]
    words = tl.arange(0, WIDTH // 32)[None, :]
    seen = tl.zeros([_AT_ONCE, WIDTH // 32], tl.int32)
    for begin in range(0, held, _AT_ONCE):
        seen = seen | tl.load(votes_in + (begin + rows) * (WIDTH // 32) + words, mask=begin + rows < held, other=0)
    bits = tl.broadcast_to(tl.reduce(seen, 0, _or)[:, None], (WIDTH // 32, 32)) >> tl.arange(0, 32)[None, :]
    return (tl.reshape(bits, (WIDTH,)) & 1) == 1


@triton.jit
def _filled(core, utility, held, wanted, numbers, EXPERTS: tl.constexpr, BITS: tl.constexpr):
    """The core with as many of the most useful other experts as are wanted; equal ones by rising id."""
    use = tl.zeros_like(numbers).to(tl.int64)
    for row in range(held):
        use += tl.load(utility + row * EXPERTS + numbers, mask=numbers < EXPERTS, other=0).to(tl.int64)
    others = (numbers < EXPERTS) & (core == 0)
    key = use * _IDS + (_IDS - 1 - numbers)
    return core | (others & (key >= _threshold(key, others, wanted, BITS)))


@triton.jit(do_not_specialize=["rows"])
def _route(
    topk_weights, weights_stride, topk_ids, ids_stride, policy, real_rows, rows,
    scores_in, order_in, votes_in, protected_in, utility_in,
    new_weights, new_ids, changed_out,
    K: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    PLAIN: tl.constexpr, COUNTED: tl.constexpr, UTILITY_BITS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Launch 2: the batch's core, and one row's ids and weights."""
    row = tl.program_id(0)
    numbers = tl.arange(0, WIDTH)
    inside = numbers < EXPERTS
    base = row * EXPERTS
    # As in launch 1; of a row that launch 1 left out these are whatever lay there, and are not used.
    scores = tl.load(scores_in + base + numbers, mask=inside, other=0.0)
    order = tl.load(order_in + base + numbers, mask=inside, other=_NEVER)
    held, k0, touched = _pass(policy, real_rows, rows, K, COUNTED)
    slots = tl.arange(0, SLOTS)
    given = topk_ids + row.to(tl.int64) * ids_stride
    ids = tl.load(given + slots, mask=slots < COLUMNS, other=0)
    weights = tl.load(topk_weights + row.to(tl.int64) * weights_stride + slots, mask=slots < COLUMNS, other=0.0)
    protected = tl.full((), -1, tl.int32)
    if touched & (row < held):
        protected = tl.load(protected_in + row)
    changed = protected < -1
    if protected >= 0:
        usable = order != _NEVER
        core = _core(votes_in, held, WIDTH)
        limit = K + 0 * k0
        if not PLAIN:
            lacking = tl.minimum(tl.load(policy + _BUDGET), EXPERTS).to(tl.int32) - tl.sum(core.to(tl.int32), 0)
            if lacking > 0:
                core = _filled(core, utility_in, held, lacking, numbers, EXPERTS, UTILITY_BITS)
            most = tl.load(policy + _K_MAX)
            limit = tl.maximum(tl.where((most > 0) & (most < K), most, K).to(tl.int32), protected)
        core = core & usable
        eligible = core
        if not PLAIN:
            deepest = tl.minimum(tl.load(policy + _MAX_RANK), EXPERTS).to(tl.int32)
            if (deepest > 0) & (deepest < EXPERTS):
                key = (order.to(tl.int64) - _NEVER) * _IDS + (_IDS - 1 - numbers)
                eligible = core & (key >= _threshold(key, inside, tl.maximum(deepest, protected), 44))
        reachable = tl.sum(eligible.to(tl.int32), 0)

        refill = tl.load(policy + _REFILL)
        kept = limit
        if refill == _STRICT:
            kept = tl.minimum(limit, reachable)
        if refill == _NONE:
            kept = protected
        picked = tl.zeros([WIDTH], tl.int32)
        for j in tl.static_range(K):
            picked += (numbers == tl.load(given + j).to(tl.int32)).to(tl.int32)
        had = tl.sum(tl.where(eligible, picked, 0), 0)
        changed = (kept > 0) & ((kept != K) | (had != tl.minimum(reachable, K)))
        if changed:
            second = core & (eligible == 0) & (refill != 0)
            after = reachable + tl.sum(second.to(tl.int32), 0)
            # Eligible experts first, then what else of the core counts, then the row's own order; -1 is out.
            turn = tl.where(usable, tl.where(eligible, 2, tl.where(second, 1, 0)), -1)
            routed = tl.zeros([SLOTS], tl.int32)
            for i in range(K):
                now = tl.where(i < reachable, 2, tl.where(i < after, 1, 0))
                _, taken = _best(tl.where(turn == now, order, _NEVER), numbers)
                routed = tl.where(slots == i, taken, routed)
                turn = tl.where(numbers == taken, -1, turn)
            gain = tl.load(scores_in + base + routed, mask=slots < kept, other=0.0)
            if RENORMALIZE:
                total = tl.sum(gain, 0)
                if tl.load(policy + _DENOMINATOR) == _NATIVE_TOPK:
                    total = tl.sum(picked.to(tl.float32) * scores, 0)
                gain = gain / (total + _EPSILON)
            if SCALE != 1.0:
                gain = gain * SCALE
            ids = tl.where(slots < K, routed.to(ids.dtype), ids)
            weights = tl.where(slots < K, gain.to(weights.dtype), weights)
    out = row.to(tl.int64) * COLUMNS + slots
    tl.store(new_ids + out, ids, mask=slots < COLUMNS)
    tl.store(new_weights + out, weights, mask=slots < COLUMNS)
    tl.store(changed_out + row, changed.to(tl.int8))


def reroute(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    router_logits: torch.Tensor,
    bias: Optional[torch.Tensor],
    policy: torch.Tensor,
    real_rows: Optional[torch.Tensor],
    rule: Any,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route one batch; arguments, results and definitions are those of ``operator.reroute``.

    Nothing is read back to the host. The five small tensors that carry numbers from launch 1 to launch 2 are taken
    anew in each call, so a CUDA graph keeps them in its own pool. Warm up before capture, as every Triton kernel
    must be: the first call of a shape compiles. Call it only where :func:`unfit` has no objection.
    """
    return _launch(topk_weights, topk_ids, router_logits, bias, policy, real_rows, rule)[:3]


def _launch(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    router_logits: torch.Tensor,
    bias: Optional[torch.Tensor],
    policy: torch.Tensor,
    real_rows: Optional[torch.Tensor],
    rule: Any,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`reroute`; the scores come fourth, for rows below real_rows of a pass that is touched."""
    rows, experts = router_logits.shape
    columns = topk_ids.shape[1]
    device = router_logits.device
    width = max(32, triton.next_power_of_2(experts))
    wide = rule.scoring == "sqrtsoftplus"
    topk_weights, topk_ids, router_logits = (
        tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (topk_weights, topk_ids, router_logits)
    )
    scores = torch.empty((rows, experts), dtype=torch.float32, device=device)
    order = torch.empty((rows, experts), dtype=torch.int32, device=device)
    votes = torch.empty((rows, width // 32), dtype=torch.int32, device=device)
    protected = torch.empty(rows, dtype=torch.int32, device=device)
    utility = votes
    if not rule.plain:
        utility = torch.empty((rows, experts), dtype=torch.int64 if wide else torch.int32, device=device)
    new_weights = torch.empty((rows, columns), dtype=topk_weights.dtype, device=device)
    new_ids = torch.empty((rows, columns), dtype=topk_ids.dtype, device=device)
    changed = torch.empty(rows, dtype=torch.int8, device=device)
    _vote[(rows,)](
        router_logits,
        router_logits.stride(0),
        scores if bias is None else bias.contiguous(),
        topk_ids,
        topk_ids.stride(0),
        policy,
        policy if real_rows is None else real_rows,
        rows,
        scores,
        order,
        votes,
        protected,
        utility,
        K=rule.k,
        COLUMNS=columns,
        EXPERTS=experts,
        SCORING=_SCORINGS.index(rule.scoring),
        RENORMALIZE=rule.renormalize,
        GROUPS=rule.groups,
        GROUPS_KEPT=rule.groups_kept,
        PLAIN=rule.plain,
        BIASED=bias is not None,
        COUNTED=real_rows is not None,
        WIDTH=width,
        GROUPS_WIDTH=triton.next_power_of_2(rule.groups),
        num_warps=WARPS,
    )
    _route[(rows,)](
        topk_weights,
        topk_weights.stride(0),
        topk_ids,
        topk_ids.stride(0),
        policy,
        policy if real_rows is None else real_rows,
        rows,
        scores,
        order,
        votes,
        protected,
        utility,
        new_weights,
        new_ids,
        changed,
        K=rule.k,
        COLUMNS=columns,
        EXPERTS=experts,
        RENORMALIZE=rule.renormalize,
        SCALE=float(rule.scale),
        PLAIN=rule.plain,
        COUNTED=real_rows is not None,
        UTILITY_BITS=(34 if wide else 24) + MOST_ROWS.bit_length() + 12,
        WIDTH=width,
        SLOTS=triton.next_power_of_2(columns),
        num_warps=WARPS,
    )
    return new_weights, new_ids, changed.view(torch.bool), scores
