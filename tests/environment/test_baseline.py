"""A saved picture of an environment: what it keeps, and what it says when the environment moves."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surgeon.environment.baseline import Baseline, check_drift, parse_baseline, take
from surgeon.environment.checks import Severity
from surgeon.environment.pins import check_pins
from surgeon.environment.snapshot import Distribution, Snapshot


def snapshot(versions: dict[str, str], *requires: str) -> Snapshot:
    """An environment with these versions."""
    listed = tuple(Distribution(n, v, f"/site/{n}-{v}.dist-info") for n, v in versions.items())
    return Snapshot("/opt/venv/bin/python", "3.11.7", "sglang", "0.5.9", requires, listed)


def saved(versions: dict[str, str]) -> Baseline:
    """The baseline of such an environment."""
    return take(snapshot(versions), [], saved=1.0, who="ada@laptop", reason="")


WORKING = {"sglang": "0.5.9", "torch": "2.9.1+cu128", "transformers": "5.3.0"}


def test_nothing_moved_is_one_line_that_says_how_much_was_compared() -> None:
    """The usual case is told, not silent."""
    (check,) = check_drift(snapshot(WORKING), saved(WORKING))
    assert (check.id, check.severity) == ("baseline", Severity.OK)
    assert "3 packages" in check.title


def test_a_moved_package_fails_with_both_versions_and_the_way_back() -> None:
    """The evidence is the dist-info that is there now."""
    (check,) = check_drift(snapshot(WORKING | {"transformers": "4.57.1"}), saved(WORKING))
    assert (check.id, check.severity) == ("drift:transformers", Severity.FAIL)
    assert check.title == "transformers moved from 5.3.0 to 4.57.1 since the baseline"
    assert check.evidence == ("/site/transformers-4.57.1.dist-info",)
    assert check.repair == ("transformers==5.3.0",)


def test_another_cuda_flavour_is_a_move() -> None:
    """A plain pin cannot see cu128 against cu130; the baseline does."""
    (check,) = check_drift(snapshot(WORKING | {"torch": "2.9.1+cu130"}), saved(WORKING))
    assert check.severity is Severity.FAIL
    assert check.repair == ("torch==2.9.1+cu128",)


def test_a_removed_package_fails() -> None:
    """It is put back at the version it had."""
    (check,) = check_drift(snapshot({"sglang": "0.5.9", "torch": "2.9.1+cu128"}), saved(WORKING))
    assert (check.id, check.severity, check.repair) == (
        "drift:transformers",
        Severity.FAIL,
        ("transformers==5.3.0",),
    )


def test_an_added_package_is_told_and_stops_nothing() -> None:
    """A package that appears (a split-out library) explains a later failure; by itself it is none."""
    checks = check_drift(snapshot(WORKING | {"nvidia-cutlass-dsl-libs": "4.4"}), saved(WORKING))
    assert [(c.id, c.severity) for c in checks] == [
        ("drift:nvidia-cutlass-dsl-libs", Severity.INFO),
        ("baseline", Severity.OK),
    ]


def test_without_a_baseline_the_way_to_save_one_is_said() -> None:
    """Never a pass: there was nothing to compare with."""
    (check,) = check_drift(snapshot(WORKING), None)
    assert (check.id, check.severity) == ("baseline", Severity.INFO)
    assert "verify-env --save" in check.title


def test_the_spelling_of_a_name_is_no_drift() -> None:
    """Flashinfer_Python and flashinfer-python are one package."""
    (check,) = check_drift(snapshot({"flashinfer-python": "0.6.3"}), saved({"Flashinfer_Python": "0.6.3"}))
    assert check.severity is Severity.OK


def test_of_two_dist_infos_the_imported_one_is_compared() -> None:
    """A second copy later on sys.path changes nothing; one that comes first does."""
    old, new = (Distribution("torch", v, f"/site/torch-{v}.dist-info") for v in ("2.8.0", "2.9.1"))
    base = saved({"torch": "2.8.0"})
    empty = snapshot({})
    first = Snapshot(empty.python, "3.11.7", "sglang", "0.5.9", (), (old, new))
    second = Snapshot(empty.python, "3.11.7", "sglang", "0.5.9", (), (new, old))
    assert [c.severity for c in check_drift(first, base)] == [Severity.OK]
    assert [c.severity for c in check_drift(second, base)] == [Severity.FAIL]


def test_pins_that_are_broken_when_it_is_saved_become_exceptions() -> None:
    """The version that is there, or that nothing is there; other findings are no exceptions."""
    seen = snapshot({"transformers": "5.3.0", "torch": "2.9.1"}, "transformers==4.57.1", "outlines", "torch==2.9.1")
    twice = Snapshot(
        seen.python,
        seen.python_version,
        seen.package,
        seen.package_version,
        seen.requires,
        (*seen.distributions, Distribution("torch", "2.8.0", "/usr/torch-2.8.0.dist-info")),
    )
    taken = take(twice, check_pins(twice, None), saved=5.0, who="ada@laptop", reason="GLM-5")
    assert taken.exceptions == {"transformers": "5.3.0", "outlines": None}
    assert taken.versions == {"transformers": "5.3.0", "torch": "2.9.1"}


def test_an_exception_survives_saving_again() -> None:
    """A second --save, when the pin is known to be meant so, keeps it as meant so."""
    seen = snapshot({"transformers": "5.3.0"}, "transformers==4.57.1")
    first = take(seen, check_pins(seen, None), saved=5.0, who="ada@laptop", reason="GLM-5")
    second = take(seen, check_pins(seen, first), saved=6.0, who="ada@laptop", reason="")
    assert second.exceptions == first.exceptions == {"transformers": "5.3.0"}


def test_undoing_an_exception_fails_though_every_pin_is_met() -> None:
    """The alarm of the silent downgrade: the pin is happy again, the server is not."""
    seen = snapshot({"transformers": "5.3.0"}, "transformers==4.57.1")
    meant = take(seen, check_pins(seen, None), saved=5.0, who="ada@laptop", reason="GLM-5")
    undone = snapshot({"transformers": "4.57.1"}, "transformers==4.57.1")
    assert [c.id for c in check_pins(undone, meant)] == ["pins"]
    assert [(c.id, c.severity) for c in check_drift(undone, meant)] == [("drift:transformers", Severity.FAIL)]


NAMES = st.text("abcdefgh-", min_size=1, max_size=12)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is slow
@given(
    baseline=st.builds(
        Baseline,
        saved=st.floats(0, 2e9),
        who=st.text(),
        python=st.text(),
        versions=st.dictionaries(NAMES, st.text()),
        exceptions=st.dictionaries(NAMES, st.none() | st.text()),
        reason=st.text(),
    )
)
def test_a_baseline_comes_back_from_the_node_as_it_was_saved(baseline: Baseline) -> None:
    """Through JSON and back, nothing is lost."""
    assert parse_baseline(json.loads(json.dumps(baseline.to_json()))) == baseline


def test_what_is_no_baseline_is_none() -> None:
    """An absent document, an empty one, or one of a later schema: as if none was saved, never half of one."""
    for raw in (None, {}, {"versions": {"torch": "1"}}, saved(WORKING).to_json() | {"schema": "surgeon/baseline/2"}):
        assert parse_baseline(raw) is None
