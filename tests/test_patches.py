"""Patches as they are shipped: what is loaded, what the hash covers, what settings are refused."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon import patches
from surgeon.errors import UsageError

FOLDER = Path(__file__).resolve().parent.parent / "patches" / "oea"
OEA = patches.load("oea")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of patches/oea that is loaded instead of the real one."""
    folder = tmp_path / "patches" / "oea"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    monkeypatch.setattr(patches, "data_dir", lambda kind: tmp_path / kind)
    return folder


def test_load_reads_what_the_patch_says_of_itself() -> None:
    """Name, version, target and defaults are those of patch.toml, as the standard library reads it."""
    about = tomllib.loads((FOLDER / "patch.toml").read_text(encoding="utf-8"))
    assert (OEA.name, OEA.version, OEA.summary) == (about["name"], about["version"], about["summary"])
    assert (OEA.package, OEA.module) == ("sglang.srt.layers.moe", "_surgeon_oea")
    assert list(OEA.wants) == about["target"]["wants"]
    assert OEA.settings == {key: spec["default"] for key, spec in about["settings"].items()}
    assert (OEA.announce, OEA.announce_flag) == (about["announce"]["function"], about["target"]["flag"])


def test_every_module_is_shipped_as_it_lies_there_and_none_is_forgotten() -> None:
    """What patch.toml lists is what the folder holds; the runtime goes last, since it imports the others."""
    about = tomllib.loads((FOLDER / "patch.toml").read_text(encoding="utf-8"))
    assert [part.name for part in OEA.parts] == list(about["modules"])
    assert {*about["modules"].values(), "runtime.py"} == {path.name for path in FOLDER.glob("*.py")}
    assert [part.content for part in OEA.parts] == [(FOLDER / file).read_bytes() for file in about["modules"].values()]
    assert OEA.shipped[-1].content == OEA.runtime


def test_an_unknown_patch_is_refused_with_the_known_ones() -> None:
    """The refusal names what there is; a path is no name."""
    for name in ("aeo", "../patches/oea", ""):
        with pytest.raises(UsageError, match="expected one of oea"):
            patches.load(name)


def test_the_hash_is_filled_into_the_shipped_module_exactly_once(copy: Path) -> None:
    """The shipped bytes are the source with one line replaced, and that line carries the patch's hash."""
    source = (copy / "runtime.py").read_bytes()
    patch = patches.load("oea")
    filled = f'PATCH_HASH = "{patch.hash}"'.encode()
    assert patch.runtime.count(filled) == 1
    assert patch.runtime.replace(filled, b'PATCH_HASH = "unset"') == source
    values = [
        node.value
        for node in ast.parse(patch.runtime).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PATCH_HASH"
    ]
    assert [ast.literal_eval(value) for value in values] == [patch.hash]


def test_the_hash_is_a_sha256_and_the_stamp_its_beginning() -> None:
    """Beacons carry the whole hash, the graft's marker the first twelve digits."""
    assert len(OEA.hash) == hashlib.sha256().digest_size * 2
    assert int(OEA.hash, 16) >= 0
    assert OEA.stamp == OEA.hash[:12]


def test_the_hash_depends_on_the_bytes_alone(copy: Path) -> None:
    """Neither where the patch lies nor when it was written counts: two checkouts give one hash."""
    here = patches.load("oea").hash
    shutil.copytree(copy, copy.parent / "moved")
    shutil.rmtree(copy)
    (copy.parent / "moved").rename(copy)
    assert patches.load("oea").hash == here


@pytest.mark.parametrize("name", ["patch.toml", *sorted(path.name for path in FOLDER.glob("*.py"))])
def test_the_hash_changes_with_any_byte_of_what_shapes_the_patch(copy: Path, name: str) -> None:
    """One more comment in the runtime or in patch.toml is another patch, and the shipped module says so."""
    before = patches.load("oea").hash
    with (copy / name).open("a", encoding="utf-8") as file:
        file.write("# one more line\n")
    changed = patches.load("oea")
    assert changed.hash != before
    assert changed.hash.encode() in changed.runtime


@pytest.mark.parametrize("text", ["", 'PATCH_HASH = "unset"\nPATCH_HASH = "unset"\n'])
def test_a_runtime_without_one_place_for_its_hash_is_refused(copy: Path, text: str) -> None:
    """A module that could not report its hash, or would report it twice, is never shipped."""
    (copy / "runtime.py").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="exactly once"):
        patches.load("oea")


def test_the_settings_file_holds_defaults_choices_and_bookkeeping() -> None:
    """The file is JSON that ends in a newline: schema, generation, every setting, and where beacons go."""
    written = OEA.settings_file({"k0": 5, "refill": "strict"}, generation=7, beacon_dir="/state/beacons")
    assert written.endswith(b"}\n")
    assert json.loads(written) == {
        "schema": "surgeon/oea-settings/1",
        "generation": 7,
        **OEA.settings,
        "k0": 5,
        "refill": "strict",
        "beacon_dir": "/state/beacons",
    }


def test_every_default_passes_its_own_check() -> None:
    """patch.toml does not contradict itself."""
    OEA.check(OEA.settings)
    OEA.check(dict.fromkeys(OEA.settings))


@given(data=st.data())
def test_a_number_is_accepted_exactly_inside_its_range(data: st.DataObject) -> None:
    """For every whole-number setting, what patch.toml's min and max enclose is accepted and nothing else is."""
    name = data.draw(st.sampled_from([key for key, spec in OEA.specs.items() if spec["type"] == "int"]))
    value = data.draw(st.integers(-10, 10_000))
    spec = OEA.specs[name]
    asked: dict[str, Any] = {name: value}
    if name == "min_rows":
        asked["max_rows"] = OEA.specs["max_rows"]["max"]
    if name == "max_rows":
        asked["min_rows"] = OEA.specs["min_rows"]["min"]
    if spec["min"] <= value <= spec["max"]:
        OEA.check(asked)
    else:
        with pytest.raises(UsageError, match=rf"{name} is {value}; expected {spec['min']}\.\.{spec['max']}") as caught:
            OEA.check(asked)
        assert caught.value.where == f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"refill": "greedy"}, "expected native or strict"),
        ({"k0": "4"}, r"expected 0\.\.64"),
        ({"k0": True}, r"expected 0\.\.64"),
        ({"k0": 4.0}, r"expected 0\.\.64"),
        ({"enabled": "yes"}, "expected true or false"),
        ({"stats": 1}, "expected true or false"),
        ({"k1": 4}, "no setting 'k1'; expected one of enabled, k0"),
        ({"min_rows": 9, "max_rows": 8}, "min_rows is 9; expected at most max_rows, 8"),
        ({"min_rows": 65}, "min_rows is 65; expected at most max_rows, 64"),
        ({"max_rows": 2}, "min_rows is 3; expected at most max_rows, 2"),
        ({"p": 0}, r"expected 0\.001\.\.1\.0"),
        ({"k0_schedule": [[3, 4, 6], [4, 8, 5]]}, "rising order without overlap"),
        ({"k0_schedule": [[5, 4, 6]]}, "has 5-4:6"),
        ({"k0_schedule": [[1, 4097, 6]]}, "has 1-4097:6"),
        ({"k0_schedule": [[1, 4, 0]]}, "has 1-4:0"),
        ({"k0_schedule": "3-4:6"}, r"expected a list of \[low, high, k0\]"),
    ],
)
def test_a_value_that_no_model_could_use_is_refused(asked: dict[str, Any], words: str) -> None:
    """Wrong kind, wrong word, unknown name, or an empty range of rows: refused before a node is asked."""
    with pytest.raises(UsageError, match=words) as caught:
        OEA.check(asked)
    assert caught.value.exit_code == 2


def test_what_is_at_its_default_is_left_out_of_the_one_line() -> None:
    """People read what was chosen: k0 or the schedule that stands for it, and what is not as usual."""
    assert OEA.say({"enabled": True, "k0": 4, "stats": False, "refill": "native"}) == "k0 = 4"
    assert OEA.say({"enabled": False, "k0": 4}) == "enabled = False, k0 = 4"
    assert OEA.say({"k0": 4, "refill": "strict"}) == "k0 = 4, refill = strict"
    assert OEA.say({"k0": 4, "k0_schedule": [[1, 2, 8], [3, 3, 6]]}) == "k0_schedule = 1-2:8,3:6"


@given(st.lists(st.integers(1, 4096), min_size=2, max_size=20, unique=True), st.integers(1, 64))
def test_a_schedule_is_read_as_it_is_said(bounds: list[int], k0: int) -> None:
    """Any schedule that passes the check survives being shown and typed again."""
    bounds.sort()
    ranges = [[low, high, k0] for low, high in zip(bounds[::2], bounds[1::2], strict=False)]
    OEA.check({"k0_schedule": ranges})
    assert patches.read_schedule(patches.say_schedule(ranges)) == ranges


@pytest.mark.parametrize("text", ["", "3-4", "3-4:", ":4", "a-4:2", "3-4:6;5-8:5", "3--4:6"])
def test_a_schedule_that_is_none_is_refused_with_an_example(text: str) -> None:
    """Exit 2 before a node is asked."""
    with pytest.raises(UsageError, match="no part of a schedule") as caught:
        patches.read_schedule(text)
    assert "1-2:8,3-4:6" in caught.value.advice


def test_one_k0_takes_a_schedule_away_and_a_schedule_leaves_k0_alone() -> None:
    """What is typed last holds: a single number means every batch."""
    base = {**OEA.settings, "k0": 4, "k0_schedule": [[3, 4, 6]], "refill": "strict"}
    assert OEA.complete({"k0": 5, "refill": None}, base) == {**base, "k0": 5, "k0_schedule": []}
    assert OEA.complete({"k0_schedule": [[1, 8, 7]]}, base) == {**base, "k0_schedule": [[1, 8, 7]]}
    assert OEA.complete({"k0": 3}) == {**OEA.settings, "k0": 3}
    assert OEA.k0s(base) == [(6, "--schedule")]
    assert OEA.k0s({**base, "k0_schedule": []}) == [(4, "--k0")]


def test_in_a_checkout_patches_and_recipes_are_those_at_the_top() -> None:
    """What is tested is what people see in the repository; test_wheel.py does the same for the wheel."""
    assert patches.data_dir("patches") == FOLDER.parent
    assert patches.data_dir("recipes") == FOLDER.parent.parent / "recipes"
