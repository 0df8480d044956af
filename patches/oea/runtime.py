"""Opportunistic Expert Activation (OEA) inside sglang's select_experts.

surgeon puts this file into an installed sglang as ``sglang/srt/layers/moe/_surgeon_oea.py``, with its settings
beside it in ``_surgeon_oea.json``, and grafts a call of :func:`route` into ``topk.py``. README.md beside the source
says what each setting does, which cases are left alone and what has been proved.

The operator is simplified OEA (arXiv 2511.02237, Algorithm 1): the k0 best experts of every row make up the base
set; each row then takes its best experts out of that set until it has k. All shapes are static and nothing is read
back to the host, so a CUDA graph can capture it. One file, because one file is what goes onto a node; Python 3.8 or
later.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

import torch

PATCH = "oea"
PATCH_VERSION = "0.1.0"
PATCH_HASH = "unset"

_SETTINGS_SCHEMA = "surgeon/oea-settings/1"
_BEACON_SCHEMA = "surgeon/beacon/1"
_SETTINGS_FILE = "_surgeon_oea.json"
_ENVIRONMENT = "SGLANG_OEA_K0"
_MOST_SETTINGS_BYTES = 65536
_EPSILON = 1e-20  # what sglang adds to the sum it renormalises by, from 0.5.17 on
_MOST_EXPERTS = 1 << 16
_AHEAD = 1 << 49  # added to an order key, puts it before all that lack it
_LOGGER = logging.getLogger(__name__)

# ---------------------------------------------------------------- settings


class Settings(NamedTuple):
    """The settings in force; patch.toml describes each."""

    enabled: bool = True
    k0: int = 4
    refill: str = "native"
    min_rows: int = 3
    max_rows: int = 64
    stats: bool = False
    generation: int = 0
    beacon_dir: str = ""


class Loaded(NamedTuple):
    """Settings, where k0 came from (``file`` or ``environment``), and what was wrong on the way."""

    settings: Settings
    source: str
    problem: Optional[str]


_INTEGERS = {"k0": (0, 64), "min_rows": (1, 4096), "max_rows": (1, 4096), "generation": (0, 2**53)}
_REFILLS = ("native", "strict")


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this process's user, or root, could have written it."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read_trusted(path: Path) -> Dict[str, Any]:
    """The settings file as JSON; ValueError or OSError if it is not one that this process may believe."""
    handle = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
            found = f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
            raise ValueError(f"expected a plain file that only uid {os.geteuid()} or root can write, found {found}")
        body = json.loads(file.read(_MOST_SETTINGS_BYTES).decode("utf-8"))
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object, found {type(body).__name__}")  # noqa: TRY004 - one error for all content
    return body


def _fault(key: str, value: Any) -> Optional[str]:
    """What is wrong with one setting, or None."""
    if key in _INTEGERS:
        low, high = _INTEGERS[key]
        fine = type(value) is int and low <= value <= high
        return None if fine else f"{key}: expected an integer in {low}..{high}, found {value!r}"
    if key in ("enabled", "stats"):
        return None if isinstance(value, bool) else f"{key}: expected true or false, found {value!r}"
    if key == "refill":
        return None if value in _REFILLS else f"refill: expected one of {', '.join(_REFILLS)}, found {value!r}"
    if key == "beacon_dir":
        fine = isinstance(value, str) and (not value or value.startswith("/"))
        return None if fine else f"beacon_dir: expected an absolute path, found {value!r}"
    if key == "schema":
        return None if value == _SETTINGS_SCHEMA else f"schema: expected {_SETTINGS_SCHEMA}, found {value!r}"
    return f"{key}: no such setting"


def read_settings(path: Path, environ: Mapping[str, str]) -> Loaded:
    """Read the settings file and SGLANG_OEA_K0.

    The file is believed only if this process's user or root owns it and nobody else can write it, and only as a
    whole: one unknown key or value out of range, and the patch stays off. The variable overrides the file's switch
    and k0 (0 is off); it cannot turn on a patch whose file is not fit to be read.
    """
    off = Settings(enabled=False, k0=0)
    try:
        body = _read_trusted(path)
    except (OSError, ValueError, RecursionError) as error:
        return Loaded(off, "file", f"{path.name}: {error}")
    faults = [fault for fault in (_fault(key, body[key]) for key in sorted(body)) if fault]
    if "schema" not in body:
        faults.append("schema: missing")
    known = {key: value for key, value in body.items() if key in Settings._fields and not _fault(key, value)}
    settings = Settings(**known)
    if settings.min_rows > settings.max_rows:
        faults.append(f"min_rows {settings.min_rows} is more than max_rows {settings.max_rows}")
    if faults:
        kept = off._replace(beacon_dir=settings.beacon_dir, generation=settings.generation)
        return Loaded(kept, "file", f"{path.name}: {'; '.join(faults)}")
    asked = environ.get(_ENVIRONMENT)
    if asked is None:
        return Loaded(settings, "file", None)
    low, high = _INTEGERS["k0"]
    k0 = int(asked) if asked.isascii() and asked.isdigit() and len(asked) <= len(str(high)) else -1
    if not low <= k0 <= high:
        return Loaded(settings, "file", f"{_ENVIRONMENT}: expected an integer in {low}..{high}, found {asked[:40]!r}")
    return Loaded(settings._replace(enabled=k0 > 0, k0=k0), "environment", None)


# ---------------------------------------------------------------- the operator


class Rule(NamedTuple):
    """How one call routes: Python constants only, so that a captured graph and a compiled one hold still.

    Attributes:
        k0: experts that each row keeps for itself.
        k: routed experts per row.
        strict: whether a row may end with fewer than k weights above zero.
        sigmoid: whether router scores are the logits' sigmoid, else their softmax.
        renormalize: whether weights are divided by their sum.
        scale: what weights are multiplied by in the end.
        groups: groups that the experts fall into; 1 where the choice is not limited to groups.
        groups_kept: groups that a row may choose from.
    """

    k0: int
    k: int
    strict: bool
    sigmoid: bool
    renormalize: bool
    scale: float
    groups: int
    groups_kept: int


def _order_key(scores: torch.Tensor) -> torch.Tensor:
    """Integers that order as the scores do and are all distinct, the lower id first among equals.

    Top-k promises nothing about ties, and tensor-parallel ranks that break one differently compute different layers.
    With these keys there are none; and what must come first can be put there by adding to the key, which is exact,
    where shifting fp32 scores by a span merges close ones.

    Args:
        scores: fp32 [rows, n], n at most 2**16, without -0.0 (a sum with a score of 0 or more never is).

    Returns:
        int64 [rows, n], of magnitude below 2**48.
    """
    bits = scores.view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return rising.long() * _MOST_EXPERTS - torch.arange(scores.shape[1], device=scores.device)


def _allowed_experts(rank_by: torch.Tensor, native: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The experts each row may use in a group-limited model: bool [rows, experts].

    The model keeps the groups with the greatest sum of their two best biased scores (``biased_grouped_topk_impl``),
    or with the greatest score (``grouped_topk_gpu``). The groups that the kernel's own picks lie in come first here:
    that is the same set, and it stays the kernel's where rounding or a tie let the kernel decide otherwise.
    """
    rows, experts = rank_by.shape
    size = experts // rule.groups
    grouped = rank_by.view(rows, rule.groups, size)
    strength = grouped.topk(2, dim=-1).values.sum(-1) if rule.sigmoid else grouped.amax(-1)
    used = torch.zeros_like(strength, dtype=torch.bool).scatter(1, native // size, value=True)
    kept = (_order_key(strength) + _AHEAD * used).topk(rule.groups_kept, dim=1).indices
    mask = torch.zeros_like(used).scatter(1, kept, value=True)
    return mask.unsqueeze(2).expand(rows, rule.groups, size).reshape(rows, experts)


def reroute(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    router_logits: torch.Tensor,
    bias: Optional[torch.Tensor],
    real_rows: Optional[torch.Tensor],
    rule: Rule,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply simplified OEA to one batch.

    Args:
        topk_weights: [rows, k + shared], what sglang chose.
        topk_ids: [rows, k + shared], the same; logical expert ids, shared experts last with ids >= experts.
        router_logits: [rows, experts], any floating dtype.
        bias: [experts], added to the scores for choosing and never for weighing; or None.
        real_rows: how many leading rows hold tokens (one integer), or None for all.
        rule: the constants.

    Returns:
        Weights and ids of the same shapes and dtypes, and bool [rows]: which rows were changed. A changed row lists
        its experts in the order the algorithm adds them: from the base set by falling score, then its own next best;
        equal scores by rising id. A row stays bit for bit as it is if the kernel's choice already holds as many
        experts of the base set as k slots can; if it is padding (an id of -1, or beyond real_rows); if a score is
        NaN; or if its ids are not k routed ones and then shared ones. The last three do not vote for the base set.
    """
    rows, experts = router_logits.shape
    k = rule.k
    logits = router_logits.float()
    scores = logits.sigmoid() if rule.sigmoid else logits.softmax(dim=-1)
    rank_by = scores if bias is None else scores + bias.float()

    native = topk_ids[:, :k]
    votes = ((native >= 0) & (native < experts)).all(1) & ~rank_by.isnan().any(1)
    if topk_ids.shape[1] > k:
        votes = votes & (topk_ids[:, k:] >= experts).all(1)
    if real_rows is not None:
        votes = votes & (torch.arange(rows, device=topk_ids.device) < real_rows)
    native = native.long().clamp(0, experts - 1)

    key = _order_key(rank_by)
    allowed = None
    if rule.groups > 1:
        allowed = _allowed_experts(rank_by, native, rule)
        key = key - _AHEAD * ~allowed
    own = key.topk(rule.k0, dim=1).indices
    ballots = votes.unsqueeze(1).expand(rows, rule.k0)
    base = torch.zeros_like(key, dtype=torch.bool).scatter(1, own, ballots).any(0)

    reachable = base if allowed is None else allowed & base
    held = base[native].sum(1)
    most = torch.full_like(held, k) if rule.strict else reachable.sum(-1).clamp(max=k)
    changed = votes & (held != most)

    chosen = (key + _AHEAD * reachable).topk(k, dim=1, sorted=True).indices
    weights = scores.gather(1, chosen)
    if rule.strict:
        weights = weights.masked_fill(~base[chosen], 0.0)
    if rule.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + _EPSILON)
    if rule.scale != 1.0:
        weights = weights * rule.scale

    pick = changed.unsqueeze(1)
    new_ids = torch.where(pick, chosen.to(topk_ids.dtype), topk_ids[:, :k])
    new_weights = torch.where(pick, weights.to(topk_weights.dtype), topk_weights[:, :k])
    if topk_ids.shape[1] > k:
        new_ids = torch.cat((new_ids, topk_ids[:, k:]), dim=1)
        new_weights = torch.cat((new_weights, topk_weights[:, k:]), dim=1)
    return new_weights, new_ids, changed


# ---------------------------------------------------------------- the beacon


def _process_start() -> Tuple[Optional[int], Optional[float]]:
    """When this process started: clock ticks after boot, as /proc/self/stat has it, and seconds since the epoch."""
    try:
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
        booted = next(
            line for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines() if line.startswith("btime")
        )
        return ticks, int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None, None


def _sglang_version() -> Optional[str]:
    """The version of the sglang that this process has loaded."""
    loaded = getattr(sys.modules.get("sglang"), "__version__", None) or getattr(
        sys.modules.get("sglang.version"), "__version__", None
    )
    if isinstance(loaded, str):
        return loaded
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def _ranks() -> Tuple[int, int]:
    """This process's rank and the number of ranks; 0 of 1 without torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank()), int(torch.distributed.get_world_size())
    return 0, 1


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured, or warmed up for capture, as far as torch and sglang say."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    for name in ("runner_utils.capture_mode", "cuda_graph_runner"):  # 0.5.14 and later; before
        asked = getattr(sys.modules.get("sglang.srt.model_executor." + name), "get_is_capture_mode", None)
        if asked is not None and asked():
            return True
    return False


def _beacon_folder(told: str) -> Optional[Path]:
    """Where beacons go: as the settings say, else the node's usual place if it is there already and is ours."""
    if told:
        folder = Path(told)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    for state in (Path("/var/lib/surgeon"), Path("~/.local/state/surgeon").expanduser()):
        folder = state / "beacons"
        if folder.is_dir() and _is_ours(folder.stat()):
            return folder
    return None


class _Journal:
    """What this process has seen itself do, and the file that tells.

    Attributes:
        open: whether there is still something to find out; once False, a pass costs one test of it.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.open = True
        self._loaded = loaded
        self._lock = threading.Lock()
        self._written = False
        self._warned = False
        self._applied = False
        self._rows = 0
        self._capture = "eager"
        self._skipped: List[str] = []
        self._seen: Set[int] = set()
        self._layers: Optional[int] = None
        self._first_layer: Optional[int] = None
        self._counter: Optional[torch.Tensor] = None
        self._mirror: Optional[torch.Tensor] = None

    def see(self, rows: int, layer_id: Optional[int], skipped: Optional[str]) -> None:
        """Note one call of route; write the beacon if it taught us something."""
        news = not self._written
        if not self._applied:
            self._rows = rows
        if skipped is None and not self._applied:
            self._applied = news = True
        elif skipped is not None and skipped not in self._skipped:
            self._skipped.append(skipped)
            news = True
        if layer_id is not None and self._layers is None:
            if layer_id in self._seen:
                self._layers = len(self._seen)
                news = True
            self._seen.add(layer_id)
        if self._capture == "eager" and _is_capturing():
            self._capture = "graph"
            news = True
        self.open = not self._applied or (layer_id is not None and self._layers is None)
        if news:
            self.write()

    def count(self, changed: torch.Tensor, layer_id: Optional[int]) -> None:
        """Count a pass and its changed rows on the device, in the first layer that comes by.

        The copy to pinned memory is captured with the rest, so that the thread that writes the beacon never calls
        CUDA: a call from another thread can break a graph capture.
        """
        if self._counter is None or self._mirror is None:
            if changed.is_cuda and torch.cuda.is_current_stream_capturing():
                return  # memory taken here would belong to the graph; the warm-up passes before it come by as well
            self._first_layer = layer_id
            self._counter = torch.zeros(2, dtype=torch.int64, device=changed.device)
            self._mirror = torch.zeros(2, dtype=torch.int64, pin_memory=changed.is_cuda)
            threading.Thread(target=self._publish, name="surgeon-oea-beacon", daemon=True).start()
        if layer_id == self._first_layer:
            rows = changed.sum()
            self._counter.add_(torch.stack((torch.ones_like(rows), rows)))
            self._mirror.copy_(self._counter, non_blocking=True)

    def _publish(self) -> None:
        told = [0, 0]
        while True:
            time.sleep(1.0)
            now = self._counts()
            if now is not None and now != told:
                told = now
                self.write()

    def _counts(self) -> Optional[List[int]]:
        return None if self._mirror is None else [int(number) for number in self._mirror.tolist()]

    def write(self) -> None:
        """Write the beacon; a failure is logged once and never raised, since the caller is a forward pass."""
        self._written = True
        try:
            with self._lock:
                self._replace(json.dumps(self._report(), indent=2).encode())
        except Exception as error:  # noqa: BLE001 - whatever it is, the server must go on
            if not self._warned:
                self._warned = True
                _LOGGER.warning("surgeon oea: no beacon written: %s", error)

    def _replace(self, content: bytes) -> None:
        folder = _beacon_folder(self._loaded.settings.beacon_dir)
        if folder is None:
            return
        partial = folder / f".{os.getpid()}.json.partial"
        partial.unlink(missing_ok=True)
        handle = os.open(str(partial), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        partial.replace(folder / f"{os.getpid()}.json")

    def _report(self) -> Dict[str, Any]:
        settings, source, problem = self._loaded
        rank, world_size = _ranks()
        ticks, started = _process_start()
        counts = self._counts()
        return {
            "schema": _BEACON_SCHEMA,
            "pid": os.getpid(),
            "start_ticks": ticks,
            "started": started,
            "rank": rank,
            "world_size": world_size,
            "patch": PATCH,
            "patch_version": PATCH_VERSION,
            "patch_hash": PATCH_HASH,
            "sglang_version": _sglang_version(),
            "state": "on" if active else "off",
            "layers": self._layers,
            "phase": "unknown (row-count gate)",
            "applied": self._applied,
            "rows": self._rows,
            "capture": self._capture,
            "skipped": "; ".join(self._skipped) or None,
            "settings": settings._asdict(),
            "settings_source": source,
            "settings_problem": problem,
            "generation": settings.generation,
            "passes": counts and counts[0],
            "rows_changed": counts and counts[1],
            "written": time.time(),
        }


# ---------------------------------------------------------------- what the graft calls

_LOADED = read_settings(Path(__file__).with_name(_SETTINGS_FILE), os.environ)
_SETTINGS = _LOADED.settings
_JOURNAL = _Journal(_LOADED)
_OUTSIDE = f"rows outside {_SETTINGS.min_rows}..{_SETTINGS.max_rows}"

active: bool = _SETTINGS.enabled and _SETTINGS.k0 > 0
if not active and _LOADED.problem:
    # route is never called now, so this is the only chance to say why.
    _LOGGER.warning("surgeon oea stays off: %s", _LOADED.problem)
    _JOURNAL.write()


def _is_limited(experts: int, k: int, groups: int, groups_kept: int, *, paired: bool) -> Tuple[bool, bool]:
    """Whether the choice is limited to groups, and whether such numbers make sense."""
    if groups <= 1 or groups_kept >= groups:
        return False, True
    size = experts // groups
    return True, size * groups == experts and groups_kept >= 1 and groups_kept * size >= k and size >= 1 + paired


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
    n_share_experts_fusion: int = 0,
    num_fused_shared_experts: int = 0,
    num_shared_topk_slots: Optional[int] = None,
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
        renormalize: see :class:`Rule`.
        use_grouped_topk: the DeepSeek and GLM family's way to choose.
        correction_bias: [experts] or None.
        dynamic_expert_bias: a bias per token (0.5.21 and later): left alone.
        scoring_func: ``softmax`` or ``sigmoid``; others are left alone.
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
    rows = topk_ids.shape[0]
    shared = num_fused_shared_experts if num_shared_topk_slots is None else num_shared_topk_slots
    if n_share_experts_fusion:
        shared = 1
    k = top_k - shared
    experts = router_logits.shape[-1]
    biased = correction_bias is not None
    sigmoid = scoring_func == "sigmoid" or (use_grouped_topk and biased)
    scale = 1.0
    if apply_routed_scaling_factor_on_output and routed_scaling_factor is not None:
        scale = float(routed_scaling_factor)
    groups, groups_kept = (num_expert_group or 1, topk_group or 1) if use_grouped_topk else (1, 1)
    limited, sound = _is_limited(experts, k, groups, groups_kept, paired=sigmoid)

    skipped: Optional[str] = None
    if not _SETTINGS.min_rows <= rows <= _SETTINGS.max_rows:
        skipped = _OUTSIDE
    else:
        for wrong, reason in (
            (_SETTINGS.k0 >= k, "k0 is not below the model's k"),
            (custom_routing_function is not None, "a custom routing function"),
            (packed_topk is not None, "top-k packed by the kernel"),
            (expert_location_dispatch_info is not None, "expert location dispatch: ids may be physical"),
            (dynamic_expert_bias is not None, "an expert bias per token"),
            (bool(routing_overridden), "sglang simulates its routing"),
            (scoring_func not in ("softmax", "sigmoid"), "an unknown scoring function"),
            (use_grouped_topk and sigmoid and not biased, "grouped sigmoid without a bias: releases differ"),
            (biased and not sigmoid, "softmax with a bias: kernels differ"),
            (not renormalize and use_grouped_topk and biased, "biased groups not renormalised: kernels differ"),
            (not renormalize and scale != 1.0, "weights scaled but not renormalised: releases differ"),
            (not renormalize and topk_ids.shape[-1] != k, "shared weights that follow the routed ones"),
            (topk_ids.shape[-1] not in (k, k + shared), "an unexpected number of top-k columns"),
            (
                router_logits.shape[0] != rows or not k <= experts <= _MOST_EXPERTS,
                "router logits of an unexpected shape",
            ),
            (correction_bias is not None and correction_bias.numel() != experts, "a bias of an unexpected shape"),
            (not sound, "groups that do not fit the experts"),
        ):
            if wrong:
                skipped = reason
                break
    tracing = torch.compiler.is_compiling()
    if not tracing and _JOURNAL.open:
        _JOURNAL.see(rows, layer_id, skipped)
    if skipped is not None:
        return topk_weights, topk_ids
    new_weights, new_ids, changed = reroute(
        topk_weights,
        topk_ids,
        router_logits,
        correction_bias,
        num_token_non_padded,
        Rule(
            k0=_SETTINGS.k0,
            k=k,
            strict=_SETTINGS.refill == "strict",
            sigmoid=sigmoid,
            renormalize=renormalize,
            scale=scale,
            groups=groups if limited else 1,
            groups_kept=groups_kept,
        ),
    )
    if _SETTINGS.stats and not tracing:
        _JOURNAL.count(changed, layer_id)
    return new_weights, new_ids
