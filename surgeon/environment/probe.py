"""Whether the server's own interpreter can build the served model's config object.

Grepping for a model type or comparing versions misleads (transformers may know the type and reject a layer type), so
the real object is built: by transformers' AutoConfig, and where that refuses, by sglang's own loader, which registers
configs of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any, Final

from surgeon.environment.checks import Check, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping

MARK: Final = "SURGEON-PROBE:"

# Runs on the node under the server's interpreter; whatever is printed around it, one line is MARK and a JSON object.
CODE: Final = f"""
import importlib, json, sys, traceback
path, trust = sys.argv[1], sys.argv[2] == "1"
said = {{"ok": False, "by": None, "type": None, "error": None, "transformers": None, "file": None}}
try:
    import transformers
    said["transformers"] = transformers.__version__
    said["file"] = transformers.__file__
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust, local_files_only=True)
    said.update(ok=True, by="transformers.AutoConfig", type=type(config).__name__)
except BaseException as error:
    said["error"] = "".join(traceback.format_exception_only(type(error), error)).strip()[-2000:]
    for name in ("sglang.srt.utils.hf_transformers_utils", "sglang.srt.hf_transformers_utils"):
        if said["transformers"] is None:
            break
        try:
            get_config = importlib.import_module(name).get_config
        except BaseException:
            continue
        try:
            config = get_config(path, trust_remote_code=trust)
            said.update(ok=True, by=name + ".get_config", type=type(config).__name__)
        except BaseException as second:
            said["error"] = "".join(traceback.format_exception_only(type(second), second)).strip()[-2000:]
        break
print("\\n{MARK}" + json.dumps(said), flush=True)
"""


def read_probe(stdout: str, stderr: str, returncode: int) -> Mapping[str, Any]:
    """The object that CODE printed; if it never got that far, one that says why."""
    for line in reversed(stdout.splitlines()):
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):
                said = json.loads(line.removeprefix(MARK))
                if isinstance(said, dict):
                    return said
    last = stderr.strip().splitlines()[-1:] or [f"exit status {returncode}, nothing printed"]
    return {"ok": False, "error": last[0]}


def judge_probe(said: Mapping[str, Any], *, model: str, model_type: str) -> Check:
    """The check for what CODE reported."""
    transformers = said.get("transformers")
    origin = (f"transformers {transformers} from {said.get('file')}",) if transformers else ()
    if said.get("ok"):
        return Check("model-config", Severity.OK, f"{said.get('type')} of {model} builds (by {said.get('by')})", origin)
    error = str(said.get("error") or "no reason given")
    return Check(
        "model-config",
        Severity.FAIL,
        f"the server's interpreter cannot build the config of {model} (model type {model_type or 'unknown'})",
        (*origin, error),
        advice=_advice(error, str(transformers or "")),
    )


def _advice(error: str, transformers: str) -> str:
    if not transformers:
        return "transformers itself does not import under the server's interpreter; reinstall it there"
    if re.search(r"does not recognize|Unrecognized|KeyError|model type", error):
        return (
            f"transformers {transformers} does not know this model type; install one that does with --no-deps, "
            "then `surgeon verify-env --save`"
        )
    return "read the error above; the server would fail in the same way when it starts"
