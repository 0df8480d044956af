"""The releases at the edges of sglang's families, asked all that `make matrix` asks of every release."""

from __future__ import annotations

import pytest

from surgeon.surgery import EXPERTS
from surgeon.surgery.recipes import recipes_of
from tests.matrix.checks import HANDS_ON, check

pytestmark = pytest.mark.wheels

EDGES = (
    *("0.4.6", "0.4.9", "0.4.10", "0.5.1", "0.5.2", "0.5.5", "0.5.6", "0.5.9", "0.5.10", "0.5.11", "0.5.13", "0.5.17"),
    *("0.5.20", "0.5.21", "0.5.23"),
)


@pytest.mark.parametrize("release", EDGES)
def test_both_places_are_found_grafted_and_taken_out_again(release: str) -> None:
    """And the witnesses, who know nothing of the locator, agree that the site is right."""
    result = check(release, seeds=100)
    assert result.problems == ()
    assert result.experts is not None
    assert result.forward is not None


def test_every_recipe_says_the_releases_that_it_was_seen_in() -> None:
    """The ranges that refusals show are those that the witness knows, without a gap."""
    last = "0.5.23"
    for recipe, (first, callee) in zip(recipes_of(EXPERTS), HANDS_ON, strict=True):
        assert recipe.releases == f"{first} to {last}"
        assert callee in recipe.anchor
        last = {"0.5.10": "0.5.9", "0.4.6.post5": "0.4.6.post4", "0.4.6": ""}[str(first)]
