"""Run by an environment's interpreter: imports modules of the sglang in a folder and says what stopped each.

    python importer.py MODULE...

For each line of standard input, a folder, it prints one JSON object: for each module the error, or an empty string.
Every folder is tried in a process of its own, forked from one that has imported torch already; so is a module that was
not reached, since an import that failed leaves half of sglang behind.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from pathlib import Path

# What every release imports, and what takes longest.
_SHARED = ("torch", "triton", "transformers")


def _tried(root: str, names: list[str]) -> dict[str, str]:
    found = {}
    sys.path.insert(0, root)
    for name in names:
        try:
            module = importlib.import_module(name)
            # The lab has an sglang of its own further down the path.
            found[name] = "" if str(module.__file__).startswith(root) else f"taken from {module.__file__}"
            if not found[name] and hasattr(module, "_surgeon_oea") and not module._surgeon_oea.active:
                found[name] = "the runtime is not active"
        except BaseException as error:  # noqa: BLE001 - whatever stops an import is the answer
            inside = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
            at = Path(inside[-1].filename).relative_to(root) if inside else "?"
            # Python adds where the other module lies, which differs between machines.
            said = re.sub(r" \(/[^)]*\)", "", str(error).partition("\n")[0].replace(root, ""))
            found[name] = f"{type(error).__name__}: {said} ({at})"
            break
    return found


def _apart(root: str, names: list[str]) -> dict[str, str]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.write(writer, json.dumps(_tried(root, names)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    found: dict[str, str] = json.loads(said) if said else {names[0]: "the process ended"}
    return found


def main() -> None:
    """Try each folder."""
    names = sys.argv[1:]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    for name in _SHARED:
        importlib.import_module(name)
    for line in sys.stdin:
        found: dict[str, str] = {}
        while missing := [name for name in names if name not in found]:
            found |= _apart(line.strip(), missing)
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
