"""Every sglang release from 0.4.6 to the newest, found, grafted and taken out again: ``make matrix``.

Lists what the package index of this machine has, fetches the wheels into surgeon's cache (0.4 GB, once), asks each
release what `checks.py` asks, and imports the grafted modules where an environment of the CPU lab is built. Prints one
line a release as it goes. Exits with 0 only if every release is found and nothing is wrong.

    python tests/matrix/run.py [RELEASE ...] [--no-imports] [--seeds N]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Some machines export it; each import of a release would then compile torch and all the rest anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from surgeon.errors import SurgeonError
from surgeon.registry import index
from surgeon.surgery import PLACES
from tests.matrix.checks import OLDEST, Checked, check
from tests.matrix.imports import Imported, Importers, environments

HEAD = ("release", "topk.py", "recipe", "line", "names passed", "bytes", "runs", "forward", "imported")
ROW = "{:<13} {:>7} {:<20} {:>5} {:>12}  {:<6} {:>5} {:>8}  {}"


def main() -> int:
    """Run it; 0 if all is well."""
    options = _options()
    try:
        names = options.release or [str(v) for v in sorted(index.releases(index.own())) if v >= OLDEST]
    except SurgeonError as error:
        sys.stderr.write(f"{error.message}; {error.advice}\n")
        return 1
    if options.imports and not environments():
        _say("No environment of the CPU lab is built; `surgeon lab up` builds one. Nothing is imported.")
    _say(ROW.format(*HEAD))
    found = wrong = 0
    started = time.monotonic()
    with Importers() as importers:
        for name in names:
            try:
                result = check(name, seeds=options.seeds)
            except SurgeonError as error:
                _say(f"{name:<13} wrong: {error.message}")
                wrong += 1
                continue
            grafts = [graft for graft in (result.experts, result.forward) if graft is not None]
            imported = importers.try_release(name, grafts) if options.imports and len(grafts) == len(PLACES) else None
            problems = [*result.problems, *([imported.problem] if imported and imported.problem else [])]
            _say(_row(result, imported))
            for problem in problems:
                _say(f"    wrong: {problem}")
            found += len(grafts) == len(PLACES)
            wrong += bool(problems)
    _say(f"{len(names)} releases, {found} found, {wrong} wrong ({time.monotonic() - started:.0f} s)")
    return 0 if found == len(names) and not wrong else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _row(result: Checked, imported: Imported | None) -> str:
    experts, forward = result.experts, result.forward
    recipe, line, passed = "-", "-", "-"
    if experts is not None:
        recipe, line, passed = experts.site.recipe, str(experts.site.line), str(len(experts.spec.wants))
    exact = "exact" if not any("bytes" in problem or "outside" in problem for problem in result.problems) else "WRONG"
    entry = str(forward.site.line) if forward is not None else "-"
    said = "" if imported is None else str(imported)
    return ROW.format(result.release, result.lines, recipe, line, passed, exact, result.runs, entry, said).rstrip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Find, graft and ungraft every sglang release.")
    parser.add_argument("release", nargs="*", help="only these, such as 0.5.9 (default: all from 0.4.6 on)")
    parser.add_argument("--no-imports", dest="imports", action="store_false", help="import nothing in the lab")
    parser.add_argument("--seeds", type=int, default=200, help="runs of each stubbed function to try (default: 200)")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
