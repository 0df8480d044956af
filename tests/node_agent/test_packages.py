"""What is installed, read from files: compared with importlib.metadata and with what pip would say."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from surgeon.node.agent import packages
from tests.support.packages import TOPK, install_package

if TYPE_CHECKING:
    from pathlib import Path


def make_dist(site: Path, name: str, version: str, **files: str) -> Path:
    """Lay out a dist-info as installers do."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    for file, content in files.items():
        (info / file.replace("_json", ".json")).write_text(content, encoding="utf-8")
    return info


def test_every_distribution_of_this_environment_is_found_as_importlib_finds_it() -> None:
    """Names, versions and installers agree with the standard library's own reading."""
    expected = {
        (one.metadata["Name"], one.version, (one.read_text("INSTALLER") or "").strip() or None)
        for one in importlib.metadata.distributions(path=sys.path)
    }
    found = {(one["name"], one["version"], one["installer"]) for one in packages.distributions(sys.path)}
    assert found == expected
    assert len(found) > 20


def test_two_dist_infos_of_one_name_are_both_listed(tmp_path: Path) -> None:
    """The standard library silently picks one."""
    make_dist(tmp_path, "flashinfer_python", "0.6.15")
    make_dist(tmp_path, "flashinfer_python", "0.6.16")
    assert [one["version"] for one in packages.distributions([str(tmp_path)])] == ["0.6.15", "0.6.16"]


def test_where_a_distribution_came_from_is_told(tmp_path: Path) -> None:
    """A direct URL says editable or local; a broken one says nothing and breaks nothing."""
    url = {"url": "file:///src/x", "dir_info": {"editable": True}}
    make_dist(tmp_path, "x", "1", INSTALLER="uv\n", direct_url_json=json.dumps(url))
    make_dist(tmp_path, "y", "2", direct_url_json="{")
    x, y = packages.distributions([str(tmp_path)])
    assert (x["installer"], x["direct_url"]) == ("uv", url)
    assert (y["installer"], y["direct_url"]) == (None, None)


def test_fields_behind_a_long_licence_are_found_and_its_text_is_no_field(tmp_path: Path) -> None:
    """METADATA of sglang 0.5.9 carries the whole licence in its header."""
    info = tmp_path / "late-1.0.dist-info"
    info.mkdir()
    licence = "License: x\n" + "        Version: 99\n" * 500
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\n{licence}Name: late\nVersion: 1.0\n", encoding="utf-8")
    (found,) = packages.distributions([str(tmp_path)])
    assert (found["name"], found["version"]) == ("late", "1.0")


def test_requirements_are_those_of_the_header_only(tmp_path: Path) -> None:
    """Extras keep their markers; the description is no header."""
    install_package(tmp_path)
    assert packages.requires(str(tmp_path / "sglang-0.5.9.dist-info")) == [
        "transformers==4.57.1",
        "torch==2.9.1",
        'pytest; extra == "test"',
    ]


def test_the_recorded_hash_is_that_of_the_bytes_that_were_installed(tmp_path: Path) -> None:
    """RECORD keeps it in another alphabet; without RECORD, or without the line, there is none."""
    package = install_package(tmp_path)
    topk = package / "srt" / "layers" / "moe" / "topk.py"
    info = tmp_path / "sglang-0.5.9.dist-info"
    topk.write_bytes(b"edited")
    assert packages.recorded_sha256(str(info), str(topk)) == hashlib.sha256(TOPK).hexdigest()
    assert packages.recorded_sha256(str(info), str(package / "other.py")) is None
    (info / "RECORD").unlink()
    assert packages.recorded_sha256(str(info), str(topk)) is None


def find(path: list[Path], locations: list[Path]) -> list[packages.Installation]:
    """Every installation on a path, where Python would import from ``locations``."""
    entries = [str(one) for one in path]
    return packages.installations("/py", entries, [str(one) for one in locations], packages.distributions(entries))


def test_two_installations_are_both_told_the_importable_one_first(tmp_path: Path) -> None:
    """Folders on two places of the path, each with its own metadata."""
    first, second = install_package(tmp_path / "a"), install_package(tmp_path / "b", version="0.5.23")
    found = find([tmp_path / "a", tmp_path / "b"], [first])
    assert [(one.package_dir, one.version) for one in found] == [(str(first), "0.5.9"), (str(second), "0.5.23")]


def test_one_folder_with_two_dist_infos_is_two_installations(tmp_path: Path) -> None:
    """An upgrade that broke off leaves both; nobody can say which is there."""
    package = install_package(tmp_path)
    make_dist(tmp_path, "sglang", "0.5.23")
    found = find([tmp_path], [package])
    assert sorted(str(one.version) for one in found) == ["0.5.23", "0.5.9"]


def test_an_editable_install_outside_of_the_path_is_one_installation(tmp_path: Path) -> None:
    """Its metadata lies in site-packages and names the source folder."""
    source = install_package(tmp_path / "src" / "python", dist_info=False)
    site = tmp_path / "site"
    url = json.dumps({"url": (tmp_path / "src" / "python").as_uri(), "dir_info": {"editable": True}})
    info = make_dist(site, "sglang", "0.5.9.dev1", direct_url_json=url)
    assert find([site], [source]) == [packages.Installation(str(source), "0.5.9.dev1", str(info), "/py", True)]


def test_a_folder_left_behind_hides_an_editable_install_and_is_told(tmp_path: Path) -> None:
    """A `sglang/__pycache__` without __init__.py is a namespace package to Python."""
    source = install_package(tmp_path / "src", dist_info=False)
    ghost = tmp_path / "site" / "sglang"
    (ghost / "__pycache__").mkdir(parents=True)
    url = json.dumps({"url": (tmp_path / "src").as_uri(), "dir_info": {"editable": True}})
    make_dist(tmp_path / "site", "sglang", "1", direct_url_json=url)
    found = find([tmp_path / "site"], [ghost, source])
    assert [(one.package_dir, one.regular, one.version) for one in found] == [
        (str(ghost), False, None),
        (str(source), True, "1"),
    ]


def test_a_package_without_metadata_has_the_version_of_its_own_file(tmp_path: Path) -> None:
    """A folder that was copied there."""
    package = install_package(tmp_path, dist_info=False, version="0.4.9")
    assert [(one.version, one.dist_info) for one in find([tmp_path], [package])] == [("0.4.9", None)]


def test_three_hundred_packages_are_read_within_the_budget(tmp_path: Path) -> None:
    """A node has that many; the best of three runs counts, since the machine has other work."""
    for number in range(300):
        info = make_dist(tmp_path, f"package_{number}", "1.0", INSTALLER="pip\n", RECORD="x\n" * 500)
        with (info / "METADATA").open("a", encoding="utf-8") as file:
            file.write("\n" + "words\n" * 5000)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        assert len(packages.distributions([str(tmp_path), os.fspath(tmp_path)])) == 300
        times.append(time.perf_counter() - began)
    assert min(times) < 0.15
