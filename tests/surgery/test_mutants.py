"""Thousands of changed files of real releases: the same site is found, or none, and never another one.

Most mutants are made of the function with some of its neighbours, which is quick to read; some of whole files. Which
seed made one is shown when it fails, and the file is kept.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.surgery import Found, Grafted, GraftSpec, graft, locate
from tests.support.mutants import NAME, Expected, Mutant, Mutation, check, mutate, shortened, tagged
from tests.support.mutations import ENCODINGS, MUTATIONS, OTHER_CALLEE, RARE_REBINDINGS
from tests.support.wheels import arguments_of, caller_locals, member, runnable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.wheels

RELEASES = (
    *("0.4.6", "0.4.9", "0.4.10", "0.5.1", "0.5.2", "0.5.5", "0.5.6", "0.5.9"),
    *("0.5.10", "0.5.11", "0.5.13", "0.5.17", "0.5.20", "0.5.21", "0.5.23"),
)
# Distinct mutants of each; 15 releases make 2,025.
EACH = 135
# Some releases have letters that latin-1 has not, and some no local but the ids and weights.
NOT_EVERYWHERE = {"latin-1", "other local renamed"}
WHOLE = {"comments", "licence header", "reformatted", "functions reordered", "decorator", "anchor into try"}
LAST_OF_A_RECIPE = {"0.4.6", "0.5.9", "0.5.23"}
WANTS = ("top_k", "renormalize", "correction_bias", "num_fused_shared_experts", "routed_scaling_factor", "layer_id")
SPEC = GraftSpec("oea", "0.1.0", "0123456789ab", wants=WANTS)
releases = pytest.mark.parametrize("release", RELEASES)


@functools.cache
def _text(release: str, *, whole: bool) -> str:
    text = tagged(member(release))
    return text if whole else shortened(text)


def _alone(release: str) -> Iterator[tuple[str, Mutant]]:
    """Mutants with their seeds: every kind alone, some on the whole file."""
    alone: list[tuple[Any, bool]] = [(kind, False) for kind in (*MUTATIONS, *ENCODINGS)]
    alone += [(kind, True) for kind in MUTATIONS if kind.kind in WHOLE and release in LAST_OF_A_RECIPE]
    for kind, whole in alone:
        for attempt in range(9):
            seed = f"{release} {kind.kind} {whole} {attempt}"
            only = [kind] if isinstance(kind, Mutation) else []
            rng = random.Random(seed)  # noqa: S311 - a reproducible choice
            mutant = mutate(rng, _text(release, whole=whole), only, None if only else kind)
            if mutant is not None:
                yield seed, mutant
                break
        else:
            assert kind.kind in NOT_EVERYWHERE, f"{kind.kind} never applies to {release}"


def _together(release: str) -> Iterator[tuple[str, Mutant]]:
    """Mutants with their seeds: two or three kinds at once, without end."""
    harmless = [kind for kind in MUTATIONS if kind.expected is Expected.FOUND]
    for number in range(10**6):
        seed = f"{release} combined {number}"
        rng = random.Random(seed)  # noqa: S311 - same
        some = [rng.choice(rng.choice([harmless, MUTATIONS])) for _ in range(rng.choice([1, 2, 2, 3]))]
        encoding = rng.choice([None, None, *ENCODINGS]) if len(some) < 3 else None
        if len(some) > 1 or encoding is not None:
            mutant = mutate(rng, _text(release, whole=False), some, encoding)
            if mutant is not None:
                yield seed, mutant


def _verdict(mutant: Mutant) -> str:
    outcome = locate(mutant.source)
    if not isinstance(outcome, Found):
        assert mutant.expected is not Expected.FOUND, getattr(outcome, "reason", "")
        return "refused"
    check(mutant.source, graft(mutant.source, SPEC))
    assert mutant.expected is not Expected.REFUSED, f"found at line {outcome.line}, by {outcome.recipe}"
    return "found"


@releases
def test_the_same_site_is_found_or_none(release: str, tmp_path: Path) -> None:
    """Harmless changes are cut right before the tagged statement, harmful ones refused; Python's ast is the judge."""
    verdicts: Counter[tuple[str, str]] = Counter()
    seen: set[bytes] = set()
    failed: list[str] = []
    for seed, mutant in itertools.chain(_alone(release), _together(release)):
        if mutant.source in seen:
            continue
        seen.add(mutant.source)
        try:
            verdict = _verdict(mutant)
        except AssertionError as error:
            kept = tmp_path / f"mutant{len(seen)}.py"
            kept.write_bytes(mutant.source)
            failed.append(
                f"{' + '.join(mutant.kinds)}: {error or 'the oracle disagrees'} (seed {seed!r}, kept as {kept})"
            )
            verdict = "failed"
        label = mutant.kinds[0] if len(mutant.kinds) == 1 else f"{len(mutant.kinds)} kinds"
        verdicts[label, verdict] += 1
        if len(seen) == EACH:
            break
    # Shown with -rP: how many were found and refused, by kind.
    print("\n".join(f"{kind}: {verdict} {count}" for (kind, verdict), count in sorted(verdicts.items())))  # noqa: T201
    assert failed == []
    assert len(seen) == EACH


def test_there_are_two_thousand_of_them() -> None:
    """Each test above counts its own; no two releases have the same file to begin with."""
    assert len({_text(release, whole=False) for release in RELEASES}) * EACH >= 2000


@releases
def test_grafted_mutants_run(release: str) -> None:
    """What is passed is bound whatever branch is taken, and the call is reached: a sample, all around it stubbed."""
    harmless = (mutant for _, mutant in _together(release) if mutant.expected is Expected.FOUND)
    for _ in range(5):
        mutant = next(harmless)
        grafted = graft(mutant.source, SPEC)
        reached = sum(_reaches(grafted, seed) for seed in range(40))
        assert reached > 0, mutant.kinds


class _Done(Exception):  # noqa: N818 - ends a run
    pass


def _reaches(grafted: Grafted, seed: int) -> bool:
    """Run the function on random branches; a name that is not bound would raise NameError."""
    coin = random.Random(seed)  # noqa: S311 - a reproducible choice of branches

    def route(weights: object, ids: object, logits: object, **passed: object) -> object:
        there = caller_locals()
        assert tuple(passed) == grafted.spec.wants
        assert all(there[name] is value for name, value in passed.items())
        assert (weights, ids, logits) == (there["topk_weights"], there["topk_ids"], there["router_logits"])
        raise _Done

    known = {"_surgeon_oea": SimpleNamespace(active=True, route=route)}
    function = runnable(grafted.result, {NAME}, coin, known)
    try:
        getattr(function, NAME)(**arguments_of(getattr(function, NAME), coin))
    except _Done:
        return True
    except (AssertionError, ValueError):
        # A check of sglang's own, or the branch of a mutation that raises.
        return False
    pytest.fail("the function ended without the call")


@pytest.mark.parametrize("release", RELEASES)
def test_an_anchor_that_calls_another_name_is_refused(release: str) -> None:
    """Ids that something else has already changed are not to be routed again."""
    mutant = mutate(random.Random(release), _text(release, whole=False), [OTHER_CALLEE], None)  # noqa: S311 - reproducible
    assert mutant is not None
    assert _verdict(mutant) == "refused"


@pytest.mark.parametrize("statement", RARE_REBINDINGS)
def test_the_function_rebound_in_a_rarer_form_is_refused(statement: str) -> None:
    """What then runs under the name is another function."""
    mutant = f"{_text('0.5.9', whole=False)}\n\n{statement}\n".encode()
    assert not isinstance(locate(mutant), Found)
