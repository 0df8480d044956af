"""What the machine and the served model are: GPUs, the model's config.json."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any, Dict, List, Optional, Sequence

from . import children
from .cmdline import option
from .packages import read
from .protocol import AgentError, Context

NVIDIA_SMI_TIMEOUT_S = 5.0

_GPU_FIELDS = ("index", "name", "uuid", "memory.total", "memory.used", "compute_cap", "driver_version")
_CONFIG_LIMIT = 1 << 20


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else text


def parse_gpus(text: str) -> List[Dict[str, Any]]:
    """Read ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``; memory is in MiB."""
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(_GPU_FIELDS):
            gpus.append({name.replace(".", "_"): _number(word) for name, word in zip(_GPU_FIELDS, words)})  # noqa: B905 - 3.10
    return gpus


def gpus(context: Context) -> List[Dict[str, Any]]:
    """Ask nvidia-smi for the node's GPUs; none where there is no nvidia-smi or no answer within 5 s."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    argv = [program, "--query-gpu=" + ",".join(_GPU_FIELDS), "--format=csv,noheader,nounits"]
    try:
        ended = children.run(context, argv, timeout_s=NVIDIA_SMI_TIMEOUT_S)
    except AgentError:
        return []
    return parse_gpus(ended.stdout.decode("utf-8", "replace")) if ended.returncode == 0 else []


def _hub_caches(environ: Dict[str, str], home: str) -> List[str]:
    """Return where huggingface_hub would keep models, by its own order of variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return [environ[name]]
    if environ.get("HF_HOME"):
        return [os.path.join(environ["HF_HOME"], "hub")]
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return [os.path.join(cache, "huggingface", "hub")]


def _snapshot(cache: str, model: str, revision: str) -> Optional[str]:
    folder = os.path.join(cache, "models--" + model.replace("/", "--"))
    ref = read(os.path.join(folder, "refs", revision), 200)
    commit = ref.decode("ascii", "replace").strip() if ref is not None else revision
    snapshot = os.path.join(folder, "snapshots", commit)
    return snapshot if os.path.isdir(snapshot) else None


def model(
    name: Optional[str], args: Sequence[str], environ: Dict[str, str], cwd: Optional[str], home: str
) -> Optional[Dict[str, Any]]:
    """Return where the served model lies and its config.json; ``config`` is None when it is not on this machine.

    Args:
        name: the model's path or its name on the hub; None when nobody knows.
        args: the server's arguments, for ``--revision``.
        environ: the server's environment, which decides where the hub's cache is.
        cwd: the server's working directory, for a relative path.
        home: the home directory of the server's user.
    """
    if not name:
        return None
    folder: Optional[str] = os.path.join(cwd or "/", os.path.expanduser(name))
    if folder is None or not os.path.isdir(folder):
        revision = option(args, "--revision") or "main"
        found = (_snapshot(cache, name, revision) for cache in _hub_caches(environ, home))
        folder = next((one for one in found if one is not None), None)
    config = None
    if folder is not None:
        data = read(os.path.join(folder, "config.json"), _CONFIG_LIMIT)
        try:
            config = json.loads(data.decode("utf-8")) if data is not None else None
        except ValueError:
            config = None
    return {"path": folder or name, "name": name, "config": config if isinstance(config, dict) else None}
