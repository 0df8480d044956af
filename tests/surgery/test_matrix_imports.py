"""A grafted release imports: topk.py and the model runner with the runtime beside them, as a server imports them."""

from __future__ import annotations

import pytest

from surgeon.lab import build, preflight
from surgeon.lab.progress import Silent
from surgeon.lab.recipes import DEFAULT, recipe
from surgeon.surgery import EXPERTS, FORWARD, graft
from tests.matrix.checks import spec_of
from tests.matrix.imports import MODULES, Importers
from tests.support.wheels import member

pytestmark = [pytest.mark.lab, pytest.mark.wheels]


def test_both_grafted_modules_import_and_the_runtime_is_on() -> None:
    """No import goes in a circle, and both modules have the runtime, switched on."""
    build.environment(recipe(DEFAULT), preflight.choose_python(recipe(DEFAULT), None), progress=Silent())
    grafts = [graft(member(DEFAULT, f"sglang/{place.file}"), spec_of(place)) for place in (EXPERTS, FORWARD)]
    with Importers() as importers:
        imported = importers.try_release(DEFAULT, grafts)
    assert (imported.problem, imported.missing) == ("", "")
    assert imported.modules == MODULES
