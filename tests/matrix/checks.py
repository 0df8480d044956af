"""What is asked of one sglang release: both places found, grafted, taken out again, and the site witnessed otherwise.

The witnesses share nothing with the locator: Python's own parser finds the anchor by what each release is known to
call, and the function is run, with everything around it stubbed, to see what the call gets and what it changes.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from surgeon import patches
from surgeon.errors import SurgeonError
from surgeon.operations.grafts import graft_spec
from surgeon.surgery import EXPERTS, FORWARD, AlreadyGrafted, graft, locate, ungraft
from tests.support.sandbox import is_wild, run_forward, run_select_experts
from tests.support.wheels import member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surgeon.surgery import Grafted, GraftSpec, Place
    from tests.support.sandbox import Seen

OLDEST = Version("0.4.6")
# How a release hands on what it has selected, by the first release that does it so.
HANDS_ON = (
    (Version("0.5.10"), "_post_process_topk_ids"),
    (Version("0.4.6.post5"), "on_select_experts"),
    (OLDEST, "record_new_token"),
)


@dataclass(frozen=True)
class Checked:
    """What one release came to.

    Attributes:
        release: the release.
        lines: of its topk.py.
        experts: the graft in `select_experts`; None if there is no site.
        forward: the graft in `ModelRunner.forward`; None if there is no site.
        runs: runs of the stubbed function that came to the site.
        problems: what is wrong, in words; empty if nothing is.
    """

    release: str
    lines: int
    experts: Grafted | None
    forward: Grafted | None
    runs: int
    problems: tuple[str, ...]


def spec_of(place: Place) -> GraftSpec:
    """The call of oea at a place, as `surgeon apply` would write it."""
    return graft_spec(patches.load("oea"), place)


def check(release: str, *, seeds: int) -> Checked:
    """Ask all of it of one release.

    Args:
        release: the release; its wheel is fetched if need be.
        seeds: how many runs of the stubbed function to try.
    """
    problems: list[str] = []
    grafts: dict[str, Grafted] = {}
    for place in (EXPERTS, FORWARD):
        source = member(release, f"sglang/{place.file}")
        try:
            grafts[place.name] = grafted = graft(source, spec_of(place))
        except SurgeonError as error:
            problems.append(f"{place.label}: {error.message}")
            continue
        problems += (f"{place.label}: {problem}" for problem in _bytes(grafted))
    experts, forward = grafts.get("experts"), grafts.get("forward")
    runs = 0
    if experts is not None:
        problems += _anchor(release, experts)
        runs, wrong = _runs(experts, seeds)
        problems += wrong
    if forward is not None:
        problems += _entry(forward)
    lines = len(member(release).splitlines())
    return Checked(release, lines, experts, forward, runs, tuple(problems))


def _bytes(grafted: Grafted) -> Iterator[str]:
    before, after = grafted.source.split(b"\n"), grafted.result.split(b"\n")
    inserted = {number - 1 for block in grafted.inserted for number in block}
    if [line for number, line in enumerate(after) if number not in inserted] != before:
        yield "the lines outside the graft are not the wheel's"
    if ungraft(grafted.result) != grafted.source:
        yield "taking the graft out does not give the wheel's bytes"
    try:
        compile(grafted.result, grafted.spec.place.file, "exec", dont_inherit=True)
    except SyntaxError as error:
        yield f"does not compile: {error}"
    answer = locate(grafted.result, grafted.spec.place)
    if not isinstance(answer, AlreadyGrafted) or answer.problem:
        yield "the graft is not recognised"


def _anchor(release: str, grafted: Grafted) -> Iterator[str]:
    callee = next(name for first, name in HANDS_ON if Version(release) >= first)
    before = _function(grafted.source)
    anchors = [node for node in before.body if callee in _called(node)]
    if not anchors or grafted.site.line != anchors[0].lineno:
        yield f"`{callee}` is called in line {[node.lineno for node in anchors]}, the site is line {grafted.site.line}"
    after = _function(grafted.result)
    cut = [index for index, node in enumerate(after.body) if "_surgeon_oea" in ast.dump(node)]
    if len(cut) != 1 or callee not in _called(after.body[cut[0] + 1]):
        yield f"the call is not one statement right before `{callee}`"


def _function(source: bytes) -> ast.FunctionDef:
    (found,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "select_experts"]
    return found


def _called(node: ast.AST) -> set[str]:
    functions = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {f.id if isinstance(f, ast.Name) else f.attr for f in functions if isinstance(f, ast.Name | ast.Attribute)}


def _runs(grafted: Grafted, seeds: int) -> tuple[int, list[str]]:
    problems: set[str] = set()
    always: set[str] | None = None
    runs = 0
    for seed in range(seeds):
        try:
            seen = run_select_experts(grafted.result, seed)
        except AssertionError as error:
            problems.add(f"run {seed}: {error}")
            continue
        if seen is not None:
            runs += 1
            problems.update(_run(grafted, seen))
            always = set(seen.names) if always is None else always & set(seen.names)
    if always is not None and not grafted.site.bound <= always:
        problems.add(f"not always bound: {', '.join(sorted(grafted.site.bound - always))}")
    if runs < seeds // 10:
        problems.add(f"only {runs} of {seeds} runs came to the site")
    off = [seen for seed in range(20) if (seen := run_select_experts(grafted.result, seed, active=False)) is not None]
    if not off or any(seen.passed is not None or not all(map(is_wild, seen.onward)) for seen in off):
        problems.add("switched off, it is not as if it were not there")
    return runs, sorted(problems)


def _run(grafted: Grafted, seen: Seen) -> Iterator[str]:
    if seen.passed is None:
        yield "the call is passed by"
        return
    if tuple(seen.passed) != grafted.spec.wants:
        yield f"it passes {', '.join(seen.passed)}"
    if any(seen.names[name] is not value for name, value in seen.passed.items()):
        yield "something else is passed than the variable of that name"
    if seen.onward != ("new ids", "new weights"):
        yield "the answer does not reach the anchor"


def _entry(grafted: Grafted) -> Iterator[str]:
    heard = run_forward(grafted.result)
    if heard is None or not all(heard):
        yield "ModelRunner.forward: the announcement of runner and batch is not the first thing that it does"
    if run_forward(grafted.result, active=False) is not None:
        yield "ModelRunner.forward: switched off, it announces all the same"
