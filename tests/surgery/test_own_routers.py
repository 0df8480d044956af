"""The shipped lists of models that topk.py does not choose for, against the model files of the wheels."""

from __future__ import annotations

import pytest

from surgeon.registry.wheels import fetch
from surgeon.surgery.own_routers import OWN_ROUTERS, OWN_ROUTING_FUNCTIONS
from tests.support.live_table import RELEASES
from tests.support.oracle.routers import own_routers, own_routing_functions


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.9", "0.5.14", "0.5.23"])
def test_the_models_with_a_router_of_their_own_are_those_of_the_wheel(version: str) -> None:
    """Every architecture that runs experts without topk.py is listed, from the release in which it begins."""
    found = own_routers(fetch(version))
    since = {one: RELEASES.index(begun) for one, (begun, _) in OWN_ROUTERS.items()}
    assert set(found) == {one for one in OWN_ROUTERS if since[one] <= RELEASES.index(version)}
    assert all(OWN_ROUTERS[one][1] == f"{file}.py" for one, file in found.items())


@pytest.mark.wheels
def test_the_models_with_a_routing_function_are_those_of_the_wheel() -> None:
    """Each that passes one is listed; the others that are listed are built from one of those files."""
    found = own_routing_functions(fetch("0.5.23"))
    assert {one: f"{file}.py" for one, file in found.items()}.items() <= OWN_ROUTING_FUNCTIONS.items()
    assert {f"{file}.py" for file in found.values()} == set(OWN_ROUTING_FUNCTIONS.values())
