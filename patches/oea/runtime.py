"""Batch-aware expert routing inside sglang: what its select_experts and its model runner call.

surgeon puts this file into an installed sglang as ``sglang/srt/layers/moe/_surgeon_oea.py``, with the modules that it
imports and its settings (``_surgeon_oea.json``) beside it, and grafts two calls: of :func:`route` into ``topk.py``, and
of :func:`announce` into ``ModelRunner.forward``. README.md beside the source says what each setting does, which cases
are left alone and what has been proved; operator.py says what is computed.

Everything that says whether a pass is re-routed, and how, is in one place, ``_NOW``: two tensors that a captured CUDA
graph reads (the policy, and how many leading rows hold tokens; 0 rows leaves a pass alone), and their counterparts in
Python, which eager calls go by. The file is long since these belong together. Python 3.8 or later.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import torch

if TYPE_CHECKING:
    from patches.oea import beacon as _beacon
    from patches.oea import operator as _operator
    from patches.oea import settings as _settings
else:
    from . import _surgeon_oea_beacon as _beacon
    from . import _surgeon_oea_operator as _operator
    from . import _surgeon_oea_settings as _settings

PATCH = "oea"
PATCH_VERSION = "0.2.0"
PATCH_HASH = "unset"

DECODE, VERIFY, DRAFT = "decode", "verify", "draft"
_SETTINGS_PATH = Path(__file__).with_name("_surgeon_oea.json")
_SECONDS_BETWEEN_LOOKS = 0.05
_ALL_ROWS = 2**31 - 1  # where nothing announces passes, every row counts and the table of k0 is the gate
_DECODE_RUNNERS = ("CudaGraphRunner", "DecodeCudaGraphRunner", "CPUGraphRunner")
_OTHER_RUNNERS = ("Draft", "MTP", "Uno", "Prefill", "Piecewise", "Breakable", "ViT")
_CAPTURE_MODULES = (
    "sglang.srt.model_executor.runner_utils.capture_mode",  # 0.5.14 and later
    "sglang.srt.model_executor.cuda_graph_runner",  # before
)
_LOGGER = logging.getLogger(__name__)


def _stamp(path: Path) -> Optional[Tuple[int, int, int]]:
    """What tells one content of a file from the next, or None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


# ---------------------------------------------------------------- what is in force


class _Now:
    """The settings in force, the ones that come next, and the pass that runs.

    A change is *armed* by the thread that watches the settings file, and taken into force by the thread that runs
    passes, at the start of the pass whose number the file names. All ranks of a server count the same passes, so all
    change at the same pass or, if it came too late for one of them, that one says so.

    Attributes:
        loaded: the settings in force.
        table: the numbers of the policy tensor, see operator.py.
        policy: the same as a tensor.
        real_rows: int64 [1]: how many leading rows of this pass hold tokens; 0 if it is to be left alone.
        announced: whether passes are announced.
        phase: what the announced pass is: DECODE, VERIFY, DRAFT, or why it is left alone.
        rows: how many rows of it hold tokens.
        number: announced passes of the model, drafts not counted.
        captured: whether the operator is part of a captured graph; then what the graph holds cannot be changed.
        written: what real_rows holds.
        from_pass: the pass from which on the settings are in force.
    """

    def __init__(self, loaded: _settings.Loaded) -> None:
        self.lock = threading.Lock()
        self.announced = False
        self.phase = ""
        self.rows = 0
        self.number = 0
        self.captured = False
        self.captured_plain = False
        self.captured_reach = 0
        self.written = _ALL_ROWS
        self.armed: Optional[_settings.Loaded] = None
        self.armed_at = 0
        self.armed_in = 0
        self.refused: Optional[Dict[str, Any]] = None
        self.from_pass = 0
        self.first = loaded.settings
        self.real_rows = torch.full((1,), _ALL_ROWS, dtype=torch.int64)
        self._hold(loaded)
        self.policy = torch.tensor(self.table, dtype=torch.int64)

    def _hold(self, loaded: _settings.Loaded) -> None:
        policy = loaded.settings.operator_policy
        self.loaded = loaded
        self.is_plain = policy.is_plain
        self.table = _operator.pack(policy)
        self.ranges = ", ".join(f"{low}..{high}" for low, high, _ in policy.schedule)
        self.reach = max((high for _, high, _ in policy.schedule), default=0)

    def place(self, device: torch.device) -> bool:
        """Bring the tensors to the device; False if that is not possible now, while a graph is being captured."""
        if self.policy.device == device:
            return True
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # memory taken here would belong to the graph; the warm-up passes before it come by as well
        with torch.inference_mode(mode=False):  # else they could not be written outside of it
            self.real_rows = torch.full((1,), self.written, dtype=torch.int64, device=device)
            self.policy = torch.tensor(self.table, dtype=torch.int64, device=device)
        return True

    def k0(self, rows: int) -> int:
        """The k0 of a pass in which so many rows hold tokens; below 0 if it is left alone."""
        return self.table[_operator.SCHEDULE + min(rows, _operator.MAX_ROWS + 1)]

    def write_rows(self, rows: int) -> None:
        """Tell captured graphs how many rows hold tokens, in the order of the stream that will replay them."""
        if rows != self.written:
            self.real_rows.fill_(rows)
            self.written = rows

    def advance(self) -> None:
        """Count a pass, and take into force what was armed for it."""
        with self.lock:
            self.number += 1
            self.announced = True
            armed = self.armed
            if armed is None or self.number < self.armed_at:
                return
            self.armed, self.from_pass = None, self.number
            self._hold(armed)
        self.policy.copy_(torch.tensor(self.table, dtype=torch.int64))

    def arm(self, loaded: _settings.Loaded) -> None:
        """Take the settings in at their pass, or refuse them; without a pass they are for processes that start."""
        asked = loaded.settings
        with self.lock:
            if loaded.problem is None and asked.generation == self.loaded.settings.generation:
                self.armed = None  # the file from before is back: the change was called off
                return
            why = loaded.problem or self._why_not(loaded)
            if why is None and asked.at_pass is None:
                return
            if why is None and asked.at_pass is not None and asked.at_pass <= self.number:
                why = f"at_pass {asked.at_pass} is over: pass {self.number} has begun"
            if why is not None:
                self.refused = {"generation": asked.generation, "why": why}
                return
            self.armed, self.armed_at, self.armed_in = loaded, asked.at_pass or 0, self.number

    def _why_not(self, loaded: _settings.Loaded) -> Optional[str]:
        asked, policy = loaded.settings, loaded.settings.operator_policy
        latest = self.armed or self.loaded
        reach = max((high for _, high, _ in policy.schedule), default=0)
        for wrong, reason in (
            (
                loaded.source == "environment",
                f"{_settings.ENVIRONMENT} in the server's environment goes before the file; restart without it",
            ),
            (
                asked.generation <= latest.settings.generation,
                f"generation {asked.generation} is not above {latest.settings.generation}",
            ),
            (asked.stats != self.first.stats, "stats is taken at the server's start; restart it to change that"),
            (
                self.captured and reach > self.captured_reach,
                f"captured graphs are made for up to {self.captured_reach} rows, found {reach}; restart the server",
            ),
            (
                self.captured and self.captured_plain and not policy.is_plain,
                "captured graphs hold no p, k_max, max_rank and budget; restart the server with them",
            ),
        ):
            if wrong:
                return reason
        return None

    def capture(self) -> None:
        """Note that a graph now holds the operator as these settings ask for it; the narrowest graph counts."""
        self.captured_reach = min(self.captured_reach, self.reach) if self.captured else self.reach
        self.captured_plain = self.captured_plain or self.is_plain
        self.captured = True

    def tell(self) -> Dict[str, Any]:
        """The beacon's part."""
        settings, source, problem = self.loaded
        armed = self.armed
        return {
            "patch": PATCH,
            "patch_version": PATCH_VERSION,
            "patch_hash": PATCH_HASH,
            "state": "on" if active and settings.is_on else "off",
            "gate": "forward-mode" if self.announced else "row-count",
            "phase": self.phase or "unknown",
            "pass": self.number,
            "form": _FORM.name,
            "settings": settings._asdict(),
            "settings_source": source,
            "settings_problem": problem,
            "generation": settings.generation,
            "in_force": {"generation": settings.generation, "from_pass": self.from_pass},
            "armed": armed
            and {"generation": armed.settings.generation, "at_pass": self.armed_at, "pass": self.armed_in},
            "refused": self.refused,
        }


class _Form:
    """Which form of the operator runs: the fused one where there is a GPU and Triton, else the one in torch.

    Attributes:
        name: for the beacon.
    """

    def __init__(self) -> None:
        self.name = "torch"
        self._kernel: Any = None
        self._asked = False
        self._proven = False

    def _load(self) -> None:
        self._asked = True
        try:
            from . import _surgeon_oea_kernel as kernel  # type: ignore[attr-defined]

            self._kernel, self.name = kernel, "triton"
        except Exception as error:  # noqa: BLE001 - whatever keeps Triton away, torch does the same
            self.name = f"torch (no fused form: {error})"

    def reroute(
        self,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        router_logits: torch.Tensor,
        bias: Optional[torch.Tensor],
        real_rows: torch.Tensor,
        rule: _operator.Rule,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``_surgeon_oea_operator.reroute``, by the policy in force."""
        given = (topk_weights, topk_ids, router_logits, bias, _NOW.policy, real_rows, rule)
        if not topk_ids.is_cuda or torch.compiler.is_compiling():
            return _operator.reroute(*given)
        if not self._asked:
            self._load()
        if self._kernel is None or self._kernel.unfit(*router_logits.shape, topk_ids.shape[1], rule) is not None:
            return _operator.reroute(*given)
        if self._proven or torch.cuda.is_current_stream_capturing():
            return self._kernel.reroute(*given)  # type: ignore[no-any-return]
        try:
            done = self._kernel.reroute(*given)
        except Exception as error:  # noqa: BLE001 - a compiler that fails must not take the server down
            self._kernel, self.name = None, f"torch (the fused form failed: {error})"
            _LOGGER.warning("surgeon oea: the fused form failed, torch goes on: %s", error)
            return _operator.reroute(*given)
        self._proven = True
        return done  # type: ignore[no-any-return]


# The stamp is taken before the file is read, so that no change falls between the two.
_FIRST_STAMP = _stamp(_SETTINGS_PATH)
_FORM = _Form()
_NOW = _Now(_settings.read_settings(_SETTINGS_PATH, os.environ))
_JOURNAL = _beacon.Journal(_NOW.first.beacon_dir, _NOW.tell)

active: bool = _NOW.first.is_on
if not active and _NOW.loaded.problem:
    # route is never called now, so this is the only chance to say why.
    _LOGGER.warning("surgeon oea stays off: %s", _NOW.loaded.problem)
    _JOURNAL.write()


class _Watch:
    """The thread that looks at the settings file and keeps the beacon up to date. It never calls CUDA."""

    def __init__(self) -> None:
        self._started = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start it, once a process."""
        if self._started:
            return
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="surgeon-oea", daemon=True).start()

    def _run(self) -> None:
        stamp, number, told = _FIRST_STAMP, -1, self._news()
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            found = _stamp(_SETTINGS_PATH)
            if found is not None and found != stamp:
                stamp = found
                _NOW.arm(_settings.read_settings(_SETTINGS_PATH, os.environ))
            news, before, number = self._news(), number, _NOW.number
            _JOURNAL.publish(number, at_rest=number == before, news=news != told)
            told = news

    @staticmethod
    def _news() -> Tuple[Any, ...]:
        return _NOW.loaded.settings.generation, _NOW.armed, _NOW.refused, _NOW.announced


_WATCH = _Watch()


# ---------------------------------------------------------------- what the second graft calls


def announce(runner: Any, forward_batch: Any) -> None:
    """Say which pass begins: called at the start of ``ModelRunner.forward``, before a captured graph is replayed.

    Passes of decode, and of the target model verifying drafts, are re-routed; all others (prefill whole, chunked or
    mixed with decode, idle, drafts, and whatever is not known) are left alone. Nothing is raised: a pass that cannot be
    judged is left alone.

    Args:
        runner: the ModelRunner; its ``is_draft_worker`` and ``device`` are read.
        forward_batch: the ForwardBatch; its ``forward_mode``, ``input_ids``, ``batch_size`` and
            ``global_num_tokens_cpu`` are read.
    """
    if getattr(runner, "is_draft_worker", False):
        _NOW.phase = DRAFT
        return
    rows = 0
    try:
        tokens = forward_batch.input_ids
        if _is_capturing(cuda=tokens.is_cuda):
            return  # what is captured is asked for in route; a write here would become part of the graph
        _NOW.advance()
        phase, rows = _judge(forward_batch)
        _NOW.place(tokens.device)
    except Exception as error:  # noqa: BLE001 - the server must go on
        phase, rows = f"a pass that could not be judged: {error!r}"[:200], 0
    _NOW.phase, _NOW.rows = phase, rows
    _NOW.write_rows(rows)
    _WATCH.start()


def _judge(forward_batch: Any) -> Tuple[str, int]:
    """What the pass is, and how many leading rows hold tokens; 0 if it is to be left alone."""
    mode = forward_batch.forward_mode
    if mode.is_decode():
        phase, rows = DECODE, min(int(forward_batch.input_ids.shape[0]), int(forward_batch.batch_size))
    elif mode.is_target_verify():
        phase, rows = VERIFY, int(forward_batch.input_ids.shape[0])
        if not _NOW.loaded.settings.verify:
            return "verify, which settings leave alone", 0
    else:
        return f"forward mode {getattr(mode, 'name', mode)}"[:80], 0
    if getattr(forward_batch, "global_num_tokens_cpu", None) is not None:
        # The layers then see the tokens of several ranks, padding between them, and perhaps another rank's prefill.
        return f"{phase} under data-parallel attention", 0
    return phase, rows


# ---------------------------------------------------------------- what captures


def _is_capturing(*, cuda: bool) -> bool:
    """Whether a graph is being captured, or warmed up for capture, as far as torch and sglang say."""
    if cuda and torch.cuda.is_current_stream_capturing():
        return True
    for name in _CAPTURE_MODULES:
        asked = getattr(sys.modules.get(name), "get_is_capture_mode", None)
        if asked is not None and asked():
            return True
    return False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _runner() -> str:
    """The graph runner that this call comes from: DECODE, or the name of another; empty if there is none.

    When a captured graph is replayed no Python runs, so what the graph is for must be known when it is captured. No one
    flag of sglang says so in all releases; the runner that captures stands on the stack in all of them.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - documented, and the way to the stack
    while frame is not None:
        runner = frame.f_locals.get("self")
        name = type(runner).__name__
        if name.endswith("Runner") and name != "ModelRunner" and "Graph" in name:
            if getattr(getattr(runner, "model_runner", None), "is_draft_worker", False):
                return f"{name} of a draft model"
            known = any(base.__name__ in _DECODE_RUNNERS for base in type(runner).__mro__)
            return DECODE if known and not any(word in name for word in _OTHER_RUNNERS) else name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


# ---------------------------------------------------------------- what the first graft calls


def _is_limited(experts: int, k: int, groups: int, groups_kept: int, *, paired: bool) -> Tuple[bool, bool]:
    """Whether the choice is limited to groups, and whether such numbers make sense."""
    if groups <= 1 or groups_kept >= groups:
        return False, True
    size = experts // groups
    return True, size * groups == experts and groups_kept >= 1 and groups_kept * size >= k and size >= 1 + paired


def _first(reasons: Tuple[Tuple[bool, str], ...]) -> Optional[str]:
    for wrong, reason in reasons:
        if wrong:
            return reason
    return None


def _why_left_alone(rows: int, k: int, *, capturing: bool, counted: bool) -> Optional[str]:
    """Why the pass that runs is none to be re-routed, or None. Not for calls that torch.compile traces.

    Where the device alone knows how many rows hold tokens (a graph, or `counted`), the table of k0 decides there; calls
    of more than twice the rows that it reaches to are spared the work.
    """
    if capturing:
        runner = _runner()
        if runner != DECODE:
            return f"a graph captured by {runner or 'no runner that is known'}"
        return None if rows <= 2 * _NOW.reach else f"graphs of more than twice {_NOW.reach} rows"
    if _NOW.announced:
        if _NOW.phase not in (DECODE, VERIFY):
            return _NOW.phase
        rows = min(rows, _NOW.rows)
    elif counted and 0 < rows <= 2 * _NOW.reach:
        return None
    k0 = _NOW.k0(rows)
    if k0 < 0:
        return f"rows outside {_NOW.ranges}" if _NOW.ranges else "switched off"
    return "k0 is not below the model's k" if k0 >= k else None


def _why_untraced(device: torch.device) -> Optional[str]:
    """The same for calls that torch.compile traces, which no number of rows may be asked of."""
    runner = _runner()
    if runner not in (DECODE, ""):
        return f"a graph traced for {runner}"
    if not runner and _NOW.announced and _NOW.phase not in (DECODE, VERIFY):
        return _NOW.phase
    return None if _NOW.policy.device == device else "traced before any pass had run"


def route(  # noqa: PLR0913 - the names that select_experts has
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    router_logits: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    use_grouped_topk: bool = False,
    correction_bias: Optional[torch.Tensor] = None,
    dynamic_expert_bias: Optional[torch.Tensor] = None,
    scoring_func: str = "softmax",
    num_expert_group: Optional[int] = None,
    topk_group: Optional[int] = None,
    num_fused_shared_experts: int = 0,
    num_shared_topk_slots: Optional[int] = None,
    n_share_experts_fusion: Optional[int] = None,
    custom_routing_function: Any = None,
    routed_scaling_factor: Optional[float] = None,
    apply_routed_scaling_factor_on_output: Optional[bool] = False,
    expert_location_dispatch_info: Any = None,
    num_token_non_padded: Any = None,
    packed_topk: Any = None,
    routing_overridden: Any = False,
    layer_id: Optional[int] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Re-route what select_experts has just chosen, or hand it back as it is.

    Every argument is the variable of that name in ``select_experts``; a release that lacks one leaves the default.

    Args:
        topk_weights: [rows, k + shared], fp32.
        topk_ids: [rows, k + shared], int32 or int64.
        router_logits: [rows, experts].
        top_k: columns asked for, fused shared experts included.
        renormalize: see :class:`_operator.Rule`.
        use_grouped_topk: the DeepSeek and GLM family's way to choose.
        correction_bias: [experts] or None.
        dynamic_expert_bias: a bias per token (0.5.21 and later): left alone.
        scoring_func: ``softmax``, ``sigmoid`` or ``sqrtsoftplus``; others are left alone.
        num_expert_group: groups of a group-limited model.
        topk_group: groups that a token may choose from.
        n_share_experts_fusion: copies of the one shared expert, up to 0.4.6.post5; a row takes one of them.
        num_fused_shared_experts: shared experts among top_k, 0.4.7 to 0.5.22.
        num_shared_topk_slots: the same from 0.5.23 on.
        custom_routing_function: scores of its own: left alone.
        routed_scaling_factor: the model's scale.
        apply_routed_scaling_factor_on_output: whether that scale is applied here rather than after the experts.
        expert_location_dispatch_info: with it, ids may be physical ones: left alone.
        num_token_non_padded: how many leading rows are real: an integer tensor of one element, an int, or None.
        packed_topk: ids packed by the kernel, which would no longer match: left alone.
        routing_overridden: sglang simulates its routing: left alone.
        layer_id: the layer, for the beacon.

    Returns:
        Weights and ids, of the shapes and dtypes given.
    """
    tracing = torch.compiler.is_compiling()
    rows = topk_ids.shape[0]
    shared = num_fused_shared_experts if num_shared_topk_slots is None else num_shared_topk_slots
    if n_share_experts_fusion and use_grouped_topk:
        shared = 1
    k = top_k - shared
    capturing = not tracing and _is_capturing(cuda=topk_ids.is_cuda)
    if tracing:
        skipped = _why_untraced(topk_ids.device)
    else:
        skipped = _why_left_alone(rows, k, capturing=capturing, counted=num_token_non_padded is not None)

    experts = router_logits.shape[-1]
    biased = correction_bias is not None
    scoring = _operator.SIGMOID if use_grouped_topk and biased else scoring_func
    softmax, sigmoid = scoring == _operator.SOFTMAX, scoring == _operator.SIGMOID
    scale = 1.0
    if apply_routed_scaling_factor_on_output and routed_scaling_factor is not None:
        scale = float(routed_scaling_factor)
    groups, groups_kept = (num_expert_group or 1, topk_group or 1) if use_grouped_topk else (1, 1)
    limited, sound = _is_limited(experts, k, groups, groups_kept, paired=sigmoid)
    skipped = skipped or _first(
        (
            (custom_routing_function is not None, "a custom routing function"),
            (packed_topk is not None, "top-k packed by the kernel"),
            (expert_location_dispatch_info is not None, "expert location dispatch: ids may be physical"),
            (dynamic_expert_bias is not None, "an expert bias per token"),
            (bool(routing_overridden), "sglang simulates its routing"),
            (not softmax and not sigmoid and scoring != _operator.SQRTSOFTPLUS, "an unknown scoring function"),
            (
                use_grouped_topk and not biased and not softmax,
                "grouped top-k without softmax or a bias: releases differ",
            ),
            (biased and softmax, "softmax with a bias: kernels differ"),
            (not renormalize and use_grouped_topk and biased, "biased groups not renormalised: kernels differ"),
            (not renormalize and scale != 1.0, "weights scaled but not renormalised: releases differ"),
            (not renormalize and topk_ids.shape[-1] != k, "shared weights that follow the routed ones"),
            (topk_ids.shape[-1] not in (k, k + shared), "an unexpected number of top-k columns"),
            (
                router_logits.shape[0] != rows or not k <= experts <= _operator.MOST_EXPERTS,
                "router logits of an unexpected shape",
            ),
            (correction_bias is not None and correction_bias.numel() != experts, "a bias of an unexpected shape"),
            (not sound, "groups that do not fit the experts"),
            (not tracing and not _NOW.place(topk_ids.device), "a graph captured without a pass before it"),
        )
    )
    if not tracing and _JOURNAL.open:
        _JOURNAL.see(rows, layer_id, skipped, captured=capturing)
    if skipped is not None:
        return topk_weights, topk_ids
    if capturing:
        _NOW.capture()
    real_rows = _NOW.real_rows
    if num_token_non_padded is not None:
        if isinstance(num_token_non_padded, torch.Tensor):
            real_rows = torch.minimum(real_rows, num_token_non_padded.reshape(1))
        else:
            real_rows = real_rows.clamp(max=int(num_token_non_padded))
    rule = _operator.Rule(
        k=k,
        scoring=scoring,
        renormalize=renormalize,
        scale=scale,
        groups=groups if limited else 1,
        groups_kept=groups_kept if limited else 1,
        plain=not tracing and _NOW.is_plain,
    )
    new_weights, new_ids, changed = _FORM.reroute(
        topk_weights, topk_ids, router_logits, correction_bias, real_rows, rule
    )
    if _NOW.first.stats and not tracing:
        _WATCH.start()
        _JOURNAL.count(changed, layer_id)
    return new_weights, new_ids
