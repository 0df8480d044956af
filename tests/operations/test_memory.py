"""Sites found before are answered without a search, and only for the very same file."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from surgeon import surgery
from surgeon.operations import memory
from tests.support import wheels

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.wheels

LOOK = """
import json, sys
from dataclasses import asdict
from surgeon.operations import memory
site = memory.locate(open(sys.argv[1], "rb").read())
seen = {"searched": "surgeon.surgery.guard" in sys.modules, "libcst": "libcst" in sys.modules}
print(json.dumps({**seen, "site": {**asdict(site), "bound": sorted(site.bound)}}))
"""


@pytest.fixture
def topk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real topk.py, and a cache of its own."""
    path = tmp_path / "topk.py"
    path.write_bytes(wheels.member("0.5.9", "sglang/srt/layers/moe/topk.py"))
    # Only now: wheels are kept in the shared cache.
    monkeypatch.setenv("SURGEON_CACHE_DIR", str(tmp_path / "cache"))
    return path


def look(path: Path) -> dict[str, object]:
    """What a new process finds."""
    done = subprocess.run([sys.executable, "-c", LOOK, str(path)], capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_a_second_look_finds_the_same_without_the_parser(topk: Path) -> None:
    """The first process has a child search; the second has none, and neither imports LibCST itself."""
    first, second = look(topk), look(topk)
    assert (first["searched"], second["searched"]) == (True, False)
    assert (first["libcst"], second["libcst"]) == (False, False)
    assert second["site"] == first["site"]


def test_a_file_that_differs_by_a_byte_is_searched_again(topk: Path) -> None:
    """One line more above, and the site is one line further down."""
    before = look(topk)["site"]
    topk.write_bytes(b"# one more line\n" + topk.read_bytes())
    after = look(topk)
    assert after["searched"] is True
    assert isinstance(before, dict)
    assert isinstance(after["site"], dict)
    assert after["site"]["line"] == before["line"] + 1


@pytest.mark.parametrize("kept", ["", "[]", '{"line": 1}'])
def test_what_cannot_be_read_back_is_searched_again(topk: Path, kept: str) -> None:
    """A torn cache is only slower."""
    found = look(topk)
    (entry,) = (topk.parent / "cache" / "sites").iterdir()
    entry.write_text(kept, encoding="utf-8")
    assert look(topk) == found


def test_a_cache_that_cannot_be_written_does_no_harm(topk: Path) -> None:
    """A file where the folder should be."""
    (topk.parent / "cache").write_text("", encoding="utf-8")
    assert isinstance(memory.locate(topk.read_bytes()), surgery.Found)
