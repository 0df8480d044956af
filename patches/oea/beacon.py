"""The beacon of the OEA runtime: what a process has seen itself do, in a file that surgeon reads.

surgeon puts this file beside ``_surgeon_oea.py`` as ``_surgeon_oea_beacon.py``. Python 3.8 or later.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set, Tuple

import torch

if TYPE_CHECKING:
    from patches.oea.settings import is_ours as _is_ours
else:
    from ._surgeon_oea_settings import is_ours as _is_ours

SCHEMA = "surgeon/beacon/1"
MOST_REASONS = 20
SECONDS_BETWEEN = 1.0  # counters reach the file this often at most
_LOGGER = logging.getLogger(__name__)


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


def ranks() -> Tuple[int, int]:
    """This process's rank and the number of ranks; 0 of 1 without torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank()), int(torch.distributed.get_world_size())
    return 0, 1


def _folder(told: str) -> Optional[Path]:
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


class Journal:
    """What this process has seen itself do, and the file that tells.

    Args:
        folder: where the file goes; empty for the node's usual place.
        tell: what the runtime says of itself: patch, settings, passes.

    Attributes:
        open: whether there is still something to find out; once False, a pass costs one test of it.
    """

    def __init__(self, folder: str, tell: Callable[[], Dict[str, Any]]) -> None:
        self.open = True
        self._to = folder
        self._tell = tell
        self._lock = threading.Lock()
        self._written = False
        self._warned = False
        self._applied = False
        self._rows = 0
        self._captured = False
        self._skipped: List[str] = []
        self._seen: Set[int] = set()
        self._layers: Optional[int] = None
        self._first_layer: Optional[int] = None
        self._counter: Optional[torch.Tensor] = None
        self._mirror: Optional[torch.Tensor] = None
        self._told: Tuple[Any, ...] = ()
        self._told_at = 0.0

    def see(self, rows: int, layer_id: Optional[int], skipped: Optional[str], *, captured: bool) -> None:
        """Note one call of route; write the beacon if it taught us something.

        Args:
            rows: of the batch.
            layer_id: the layer, where the release tells.
            skipped: why the batch was left alone; None if it was re-routed.
            captured: whether a CUDA graph is being captured, or warmed up for capture.
        """
        news = not self._written
        if not self._applied:
            self._rows = rows
        if skipped is None and not self._applied:
            self._applied = news = True
        elif skipped is not None and skipped not in self._skipped and len(self._skipped) < MOST_REASONS:
            self._skipped.append(skipped)
            news = True
        if layer_id is not None and self._layers is None:
            if layer_id in self._seen:
                self._layers = len(self._seen)
                news = True
            self._seen.add(layer_id)
        if captured and not self._captured:
            self._captured = news = True
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
            with torch.inference_mode(mode=False):
                self._mirror = torch.zeros(2, dtype=torch.int64, pin_memory=changed.is_cuda)
                self._counter = torch.zeros(2, dtype=torch.int64, device=changed.device)
        if layer_id == self._first_layer:
            rows = changed.sum()
            self._counter.add_(torch.stack((torch.ones_like(rows), rows)))
            self._mirror.copy_(self._counter, non_blocking=True)

    def _counts(self) -> Optional[List[int]]:
        return None if self._mirror is None else [int(number) for number in self._mirror.tolist()]

    def publish(self, number: int, *, at_rest: bool, news: bool) -> None:
        """Write the beacon if it is behind: at once for news and when passes have come to rest, else once a second.

        Args:
            number: how many passes there were.
            at_rest: whether no pass has come since the last call.
            news: whether there is more to tell than counters.
        """
        now = (number, self._counts())
        if news or (now != self._told and (at_rest or time.monotonic() - self._told_at >= SECONDS_BETWEEN)):
            self._told, self._told_at = now, time.monotonic()
            self.write()

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
        folder = _folder(self._to)
        if folder is None:
            return
        partial = folder / f".{os.getpid()}.json.partial"
        partial.unlink(missing_ok=True)
        handle = os.open(str(partial), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        partial.replace(folder / f"{os.getpid()}.json")

    def _report(self) -> Dict[str, Any]:
        rank, world_size = ranks()
        ticks, started = _process_start()
        counts = self._counts()
        return {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "start_ticks": ticks,
            "started": started,
            "rank": rank,
            "world_size": world_size,
            "sglang_version": _sglang_version(),
            **self._tell(),
            "layers": self._layers,
            "applied": self._applied,
            "rows": self._rows,
            "capture": "graph" if self._captured else "eager",
            "skipped": "; ".join(self._skipped) or None,
            "passes": counts and counts[0],
            "rows_changed": counts and counts[1],
            "written": time.time(),
        }
