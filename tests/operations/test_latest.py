"""The newest release that the node's index has, and the patch on it: real indexes, real pip, real files of sglang."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from surgeon import patches, surgery
from surgeon.operations import latest
from surgeon.operations.served import Served
from surgeon.registry import index as registry
from surgeon.registry import settings
from tests.support.local_index import LocalIndex, local_index
from tests.support.local_node import local_node
from tests.support.wheels import member

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from surgeon.node.client import Node

pytestmark = pytest.mark.wheels

QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8}


@pytest.fixture(autouse=True)
def topk() -> bytes:
    """topk.py of 0.5.23, read before the cache is another."""
    return member("0.5.23")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topk: bytes) -> Iterator[Node]:
    """This machine, with settings that name no index, as a node."""
    assert topk
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    monkeypatch.setenv("SURGEON_CACHE_DIR", str(tmp_path / "cache"))
    with local_node(tmp_path / "state") as connected:
        yield connected


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    """An index with nothing in it yet."""
    with local_index(tmp_path / "index") as served:
        yield served


@pytest.fixture
def python(tmp_path: Path, index: LocalIndex) -> str:
    """The node's environment: its own pip.conf names the index, with credentials."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    address = index.url.replace("://", "://someone:hush@")
    (tmp_path / "venv" / "pip.conf").write_text(f"[global]\nindex-url = {address}\n")
    return str(tmp_path / "venv" / "bin" / "python")


def checked(
    node: Node | None, python: str = "", installed: str = "0.5.9", served: Served | None = None
) -> latest.Latest:
    """Ask, and get an answer."""
    found = latest.check(installed, patches.load("oea"), served, node, python)
    assert isinstance(found, latest.Latest), found
    return found


def test_the_node_s_index_is_asked_and_the_patch_tried(node: Node, python: str, index: LocalIndex, topk: bytes) -> None:
    """Two releases behind; it fits; the served model is judged there as if launched anew; one more round trip."""
    for version in ("0.5.9", "0.5.22", "0.5.23", "0.5.24rc1"):
        index.add(version, topk)
    served = Served(
        config=QWEN3,
        args={"moe_runner_backend": "triton", "internal_states": []},
        launched={"moe_runner_backend": "flashinfer_trtllm"},
        capability=(10, 0),
    )
    before = node.transport.round_trips
    found = checked(node, python, served=served)
    assert node.transport.round_trips - before <= 3
    assert (found.version, found.behind, found.whose) == ("0.5.23", 2, "the node's")
    assert found.index == index.url
    assert found.source.endswith("venv/pip.conf")
    assert isinstance(found.located, surgery.Found)
    assert found.located.recipe == "before-post-process"
    assert {"router_logits", "topk_config"}.isdisjoint(found.names)
    assert {"correction_bias", "num_shared_topk_slots"} <= set(found.names)
    assert found.misfit == ""
    assert isinstance(found.live, surgery.NotReached)
    assert found.warnings == ()
    assert "hush" not in repr(found)


def test_a_release_that_the_patch_does_not_fit_says_why(node: Node, python: str, index: LocalIndex) -> None:
    """Nothing is judged as reached that is not there."""
    index.add("0.7.0", b"def select_experts(hidden_states, router_logits):\n    return fused(router_logits)\n")
    found = checked(node, python, served=Served(config=QWEN3))
    assert "sglang 0.7.0" in found.misfit
    assert isinstance(found.located, surgery.NotFound)
    assert (found.names, found.live, found.behind) == ((), None, 1)


def test_where_the_node_s_index_cannot_be_asked_this_machine_s_is(
    node: Node, python: str, index: LocalIndex, tmp_path: Path, topk: bytes
) -> None:
    """The node has access and this machine has none: that is told, and which one was asked instead."""
    index.credentials = "someone:hush"
    config = tmp_path / ".config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True)
    with local_index(tmp_path / "mine") as mine:
        mine.add("0.5.23", topk)
        config.write_text(f"[global]\nindex-url = {mine.url}\n")
        found = checked(node, python)
    assert (found.index, found.whose) == (mine.url, "this machine's")
    (warning,) = found.warnings
    assert index.url in warning
    assert "credentials that this machine does not have" in warning
    assert "hush" not in repr(found)


@pytest.mark.parametrize(
    ("content", "why"), [(None, "it has no sglang/srt"), (b"x" * 4_000_001, "is larger than")], ids=["none", "huge"]
)
def test_a_wheel_that_cannot_be_judged_is_told(tmp_path: Path, content: bytes | None, why: str) -> None:
    """It may come from anywhere."""
    served = LocalIndex(tmp_path)
    served.add("1.0", content or b"")
    (wheel,) = tmp_path.rglob("*.whl")
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("sglang/__init__.py", "")
    with pytest.raises(registry.RegistryError, match=why):
        latest._read(wheel, registry.Index("https://host/simple", "", {}, own=False))
    wheel.write_bytes(b"<html>sign in</html>")
    with pytest.raises(registry.RegistryError, match="it is no wheel"):
        latest._read(wheel, registry.Index("https://host/simple", "", {}, own=False))


def test_no_index_at_all_is_no_error(
    node: Node, python: str, index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt is told."""
    index.status = 404
    monkeypatch.setattr(settings, "PYPI", "http://127.0.0.1:9/simple")
    found = latest.check("0.5.9", patches.load("oea"), None, node, python)
    assert isinstance(found, latest.NotKnown)
    assert len(found.why) == 2
    assert "has no sglang (404)" in found.why[0]
    assert "connection was refused" in found.why[1]


@pytest.mark.parametrize(
    ("installed", "behind"),
    [
        ("0.5.24", 0),
        ("0.5.23", 0),
        ("0.5.22.post1", 1),
        ("0.5.24.dev5+gabc", 0),
        ("0.0.0.dev1+g123", None),
        ("unknown", None),
    ],
)
def test_how_far_behind_is_counted_in_releases(installed: str, behind: int | None) -> None:
    """A build of the main branch calls itself 0.0.0, which is older than nothing."""
    known = [Version(one) for one in ("0.5.23", "0.5.22", "0.5.9")]
    assert latest._behind(installed, known) == behind


@pytest.mark.timeout(600)
def test_the_real_registry_tells_its_newest_release() -> None:
    """The one test that asks this machine's own index, whatever upstream has released by then."""
    found = checked(None, installed="0.5.9")
    assert found.behind is not None
    assert found.behind >= 18
    assert bool(found.names) != bool(found.misfit)
    assert isinstance(found.located, surgery.Found) == (found.misfit == "")
