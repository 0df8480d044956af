"""sglang's pins against what is installed: which requirements count on this node, and what counts as met."""

from __future__ import annotations

import email
from dataclasses import replace

import pytest

from surgeon.environment.baseline import Baseline
from surgeon.environment.checks import Check, Severity
from surgeon.environment.pins import check_pins
from surgeon.environment.snapshot import Distribution, Snapshot
from tests.support.wheels import member


def snapshot(*requires: str, **installed: str) -> Snapshot:
    """An sglang 0.5.9 with these pins on Python 3.11, and these versions by module name."""
    return Snapshot(
        python="/opt/venv/bin/python",
        python_version="3.11.7",
        package="sglang",
        package_version="0.5.9",
        requires=requires,
        distributions=tuple(
            Distribution(name, version, f"/site/{name}-{version}.dist-info") for name, version in installed.items()
        ),
    )


def findings(seen: Snapshot, baseline: Baseline | None = None) -> dict[str, Severity]:
    """Severity by check."""
    return {check.id: check.severity for check in check_pins(seen, baseline)}


MET = {"pins": Severity.OK}


@pytest.mark.parametrize(
    ("pin", "version", "met"),
    [
        ("torch==2.9.1", "2.9.1", True),
        ("torch==2.9.1", "2.9.1+cu128", True),
        ("torch<=2.9.1", "2.9.1+cu130", True),
        ("torch==2.9.1+cu129", "2.9.1+cu128", False),
        ("torch==2.9.1", "2.9.0+cu128", False),
        ("torch", "0.0.1", True),
        ("torch>=5.0.0,<6", "5.3.0", True),
        ("torch>=5.0.0", "5.1.0rc1", True),
        ("torch>=5.0.0", "5.0.0rc0", False),
        ("torch>=0.5.9", "0.5.9.dev123+g1a2b3c4", False),
        ("torch>=0.5.9", "0.0.0.dev1+g1a2b3c4", False),
        ("torch>=0.5.9", "unknown", False),
        ("torch @ https://example.org/torch-2.9.1-py3-none-any.whl", "2.9.1", True),
    ],
)
def test_a_version_meets_a_pin_by_pep_440(pin: str, version: str, met: bool) -> None:  # noqa: FBT001 - a table's column
    """Local labels do not count, pre-releases are admitted and sort below their release, no version is below all."""
    assert findings(snapshot(pin, torch=version)) == (MET if met else {"pin:torch": Severity.WARN})


@pytest.mark.parametrize(
    ("marker", "counts"),
    [
        ('sys_platform == "linux"', True),
        ('sys_platform == "darwin"', False),
        ('platform_system == "Windows"', False),
        ('os_name == "posix"', True),
        ('python_version >= "3.11"', True),
        ('python_version < "3.11"', False),
        ('python_full_version < "3.11.8"', True),
        ('platform_machine == "x86_64"', True),
        ('platform_machine == "aarch64"', False),
        ('extra == "diffusion"', False),
        ('sys_platform == "linux" and extra == "test"', False),
    ],
)
def test_a_marker_is_judged_for_the_node(marker: str, counts: bool) -> None:  # noqa: FBT001 - a table's column
    """What is asked for on other systems, Pythons, machines, or by extras, is not missing here."""
    assert findings(snapshot(f"av==16.1.0; {marker}")) == ({"pin:av": Severity.WARN} if counts else MET)


def test_the_machine_of_the_markers_is_the_nodes_own() -> None:
    """An aarch64 node is judged as one, whatever machine surgeon runs on."""
    arm = replace(snapshot('av==16.1.0; platform_machine == "aarch64"'), machine="aarch64")
    assert findings(arm) == {"pin:av": Severity.WARN}


def test_a_finding_names_what_is_there_what_is_wanted_and_where_it_is_written() -> None:
    """The title is the comparison, the evidence the very line of the metadata."""
    assert check_pins(snapshot("transformers==4.57.1", transformers="5.3.0"), None) == [
        Check(
            "pin:transformers",
            Severity.WARN,
            "transformers is 5.3.0; sglang asks for ==4.57.1",
            ("Requires-Dist of sglang 0.5.9: transformers==4.57.1",),
            advice="if this is meant, `surgeon verify-env --save` records it; a reinstall of the package would undo it",
        )
    ]


def test_a_missing_package_is_named_with_its_pin() -> None:
    """Missing is not the same as another version."""
    (check,) = check_pins(snapshot("outlines==0.1.11", "torch==2.9.1", torch="2.9.1+cu128"), None)
    assert (check.id, check.title) == ("pin:outlines", "outlines is not installed; sglang asks for ==0.1.11")


def test_names_are_compared_as_pep_503_does() -> None:
    """`Requires-Dist: Flashinfer_Python` is met by flashinfer-python."""
    assert findings(snapshot("Flashinfer_Python==0.6.3", **{"flashinfer-python": "0.6.3"})) == MET


def test_a_line_that_is_no_requirement_hides_no_other() -> None:
    """Metadata written by broken tools: what cannot be read is passed over, the rest is judged."""
    assert findings(snapshot("torch = = 2", "av>=16", av="15.0")) == {"pin:av": Severity.WARN}


def test_all_met_is_said_with_their_number() -> None:
    """One line for the usual case, counting only what applies here."""
    seen = snapshot("torch==2.9.1", 'av; sys_platform == "win32"', "numpy", torch="2.9.1", numpy="2.3.5")
    assert [check.title for check in check_pins(seen, None)] == ["all 2 pins of sglang 0.5.9 are met"]


def test_one_name_with_two_dist_infos_is_a_warning_that_names_both() -> None:
    """importlib.metadata picks one and says nothing; the one that counts is the first on sys.path."""
    first, second = (Distribution("torch", v, f"/site/torch-{v}.dist-info") for v in ("2.8.0", "2.9.1"))
    seen = replace(snapshot("torch==2.8.0"), distributions=(first, second))
    (check,) = check_pins(seen, None)
    assert (check.id, check.severity) == ("duplicate:torch", Severity.WARN)
    assert check.title == "torch is installed 2 times: 2.8.0, 2.9.1"
    assert check.evidence == (first.dist_info, second.dist_info)
    turned = replace(seen, distributions=(second, first))
    assert findings(turned) == {"pin:torch": Severity.WARN, "duplicate:torch": Severity.WARN}


def test_one_dist_info_seen_by_two_paths_is_no_duplicate() -> None:
    """The same folder listed twice on sys.path holds one package."""
    once = Distribution("torch", "2.9.1", "/site/torch-2.9.1.dist-info")
    assert findings(replace(snapshot("torch==2.9.1"), distributions=(once, once))) == MET


EXCEPTIONS: dict[str, str | None] = {"transformers": "5.3.0", "outlines": None}
MEANT = Baseline(1.0, "ada@laptop", "/opt/venv/bin/python", {}, EXCEPTIONS)


def test_an_exception_of_the_baseline_turns_the_warning_into_information() -> None:
    """What somebody recorded as meant so is told, not warned of; a missing package may be meant so too."""
    seen = snapshot("transformers==4.57.1", "outlines==0.1.11", transformers="5.3.0")
    assert findings(seen) == {"pin:transformers": Severity.WARN, "pin:outlines": Severity.WARN}
    assert findings(seen, MEANT) == {"pin:transformers": Severity.INFO, "pin:outlines": Severity.INFO}


def test_an_exception_excuses_its_own_version_only() -> None:
    """A third version is neither pinned nor meant."""
    seen = snapshot("transformers==4.57.1", "outlines==0.1.11", transformers="5.4.0", outlines="0.2")
    assert findings(seen, MEANT) == {"pin:transformers": Severity.WARN, "pin:outlines": Severity.WARN}


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("machine", "asked", "other"), [("x86_64", "torchcodec", "av"), ("aarch64", "av", "torchcodec")]
)
def test_the_real_pins_of_a_release_differ_by_machine(machine: str, asked: str, other: str) -> None:
    """The metadata of sglang 0.5.9: an empty environment lacks what that machine needs, and no extra."""
    metadata = email.message_from_bytes(member("0.5.9", "sglang-0.5.9.dist-info/METADATA"))
    seen = replace(snapshot(*metadata.get_all("Requires-Dist", [])), machine=machine)
    missing = findings(seen)
    assert "pin:torch" in missing
    assert f"pin:{asked}" in missing
    assert f"pin:{other}" not in missing
    assert "pin:diffusers" not in missing
