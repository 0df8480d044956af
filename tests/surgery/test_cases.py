"""Every recipe against its own cases, as patches/oea/cases keeps them: what it fits, and what it refuses and how."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from surgeon import patches
from surgeon.errors import DoesNotFitError
from surgeon.surgery import Ambiguous, GraftSpec, NotFound, graft, locate, ungraft
from surgeon.surgery.places import FORWARD, Place
from surgeon.surgery.recipes import RECIPES

FOLDER = patches.data_dir("patches") / "oea" / "cases"
BY_NAME = {recipe.name: recipe for recipe in RECIPES}
OUTCOMES = {"not-found": NotFound, "ambiguous": Ambiguous}


def _cases(kind: str) -> list[Any]:
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        found += [pytest.param(data["recipe"], case, id=f"{path.stem}: {case['title']}") for case in data[kind]]
    return found


def _spec(place: Place) -> GraftSpec:
    named = ("oea", "0.1.0", "0123456789ab")
    if place == FORWARD:
        return GraftSpec(*named, function="announce", place=place)
    return GraftSpec(*named, wants=("top_k", "renormalize", "layer_id"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_has_cases(recipe: Any) -> None:
    """A recipe comes with something that it fits and with more than one thing that it refuses."""
    data = tomllib.loads((FOLDER / f"{recipe.name}.toml").read_text(encoding="utf-8"))
    assert data["recipe"] == recipe.name
    assert len(data["valid"]) >= 1
    assert len(data["invalid"]) >= 2


def test_no_case_is_left_behind() -> None:
    """A file of cases belongs to a recipe that there is."""
    assert {path.stem for path in FOLDER.glob("*")} == set(BY_NAME)


@pytest.mark.parametrize(("recipe", "case"), _cases("valid"))
def test_what_fits_becomes_what_is_written_there(recipe: str, case: dict[str, Any]) -> None:
    """The recipe itself finds the site, the graft is the one written out, and taking it out gives the case back."""
    before, after = case["before"].encode(), case["after"].encode()
    grafted = graft(before, _spec(BY_NAME[recipe].place))
    assert grafted.site.recipe == recipe
    assert grafted.result.decode() == case["after"]
    assert ungraft(after) == before


@pytest.mark.parametrize(("recipe", "case"), _cases("invalid"))
def test_what_does_not_fit_is_refused_in_these_words(recipe: str, case: dict[str, Any]) -> None:
    """The refusal is of the kind written there, says why, and shows the lines, which graft shows too."""
    source = case["source"].encode()
    outcome = locate(source, BY_NAME[recipe].place)
    assert isinstance(outcome, OUTCOMES[case["outcome"]])
    assert isinstance(outcome, NotFound | Ambiguous)
    assert case["says"] in outcome.reason
    shown = outcome.nearest if isinstance(outcome, NotFound) else outcome.candidates
    assert [line.number for line in shown] == case["lines"]
    assert all(case["source"].splitlines()[line.number - 1] == line.text for line in shown)
    with pytest.raises(DoesNotFitError) as caught:
        graft(source, _spec(BY_NAME[recipe].place))
    assert case["says"] in caught.value.message
    assert all(line.text.strip() in caught.value.message for line in shown)
