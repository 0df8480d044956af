"""The field case that verify-env exists for: a reinstall puts an old transformers back and nobody says a word.

Real pip, in a real environment, with stand-in wheels. sglang 0.5.9 pins transformers exactly; a model needs a newer
one, which is installed over the pin on purpose. ``pip check`` is red while that works and green once it is broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from surgeon.environment.baseline import check_drift, parse_baseline, take
from surgeon.environment.checks import Check, Severity
from surgeon.environment.pins import check_pins
from tests.support.standins import Environment, wheel

if TYPE_CHECKING:
    from pathlib import Path

    from surgeon.environment.baseline import Baseline


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Sglang 0.5.9 as pip installs it, then the transformers that the model needs over its pin."""
    wheels = tmp_path / "wheels"
    wheel(wheels, "sglang", "0.5.9", requires=["transformers==4.57.1"])
    for version in ("4.57.1", "5.3.0"):
        wheel(wheels, "transformers", version)
    made = Environment(tmp_path / "venv", wheels)
    assert made.install("sglang==0.5.9").returncode == 0
    assert made.install("transformers==5.3.0").returncode == 0
    return made


def verify(environment: Environment, baseline: Baseline | None) -> list[Check]:
    """What verify-env says of packages."""
    snapshot = environment.snapshot("sglang")
    return [*check_drift(snapshot, baseline), *check_pins(snapshot, baseline)]


def save(environment: Environment) -> Baseline:
    """Record the environment as one that works, and read it back as the node would keep it."""
    snapshot = environment.snapshot("sglang")
    taken = take(snapshot, check_pins(snapshot, None), saved=1.0, who="ada@laptop", reason="GLM-5 needs it")
    kept = parse_baseline(taken.to_json())
    assert kept == taken
    return taken


def test_verify_is_red_where_pip_check_is_green_and_green_where_it_is_red(environment: Environment) -> None:
    """Before the reinstall only pip complains; after it only surgeon does, and what it asks to install mends it."""
    baseline = save(environment)
    assert baseline.exceptions == {"transformers": "5.3.0"}
    assert environment.pip("check").returncode == 1
    assert {check.severity for check in verify(environment, baseline)} == {Severity.OK, Severity.INFO}

    reinstalled = environment.install("--force-reinstall", "sglang==0.5.9")
    assert (reinstalled.returncode, reinstalled.stdout) == (0, "")

    assert environment.pip("check").returncode == 0
    (failure,) = (check for check in verify(environment, baseline) if check.severity is Severity.FAIL)
    assert failure.id == "drift:transformers"
    assert "5.3.0" in failure.title
    assert "4.57.1" in failure.title

    assert environment.install("--no-deps", *failure.repair).returncode == 0
    assert {check.severity for check in verify(environment, baseline)} == {Severity.OK, Severity.INFO}
