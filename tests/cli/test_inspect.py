"""``surgeon inspect topk`` on unpacked packages, as people and programs read it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.cli import surgeon, terminal
from tests.support.local_index import local_index
from tests.support.packages import install_package
from tests.support.servers import free_port
from tests.support.wheels import TOPK, member

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.wheels

QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8}


@pytest.fixture
def copied(site: Path, tmp_path: Path) -> Path:
    """A site of one's own, with topk.py and the metadata of 0.5.9."""
    folder = tmp_path / "site"
    (folder / TOPK).parent.mkdir(parents=True)
    shutil.copy(site / TOPK, folder / TOPK)
    shutil.copytree(site / "sglang-0.5.9.dist-info", folder / "sglang-0.5.9.dist-info")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A config.json."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3))
    return path


def test_people_see_the_tree_the_site_and_the_excerpt(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --verbose: who calls whom, what each is, where kernels come from, and the line of the site."""
    monkeypatch.setenv("COLUMNS", "120")
    shown = surgeon("inspect", "topk", "--site", site)
    assert shown.code == 0
    lines = shown.stdout.splitlines()
    assert any(line.split() == ["RECORD", "as", "installed"] for line in lines)
    assert "❱ 1048     get_global_expert_distribution_recorder().on_select_experts(topk_ids=topk_ids)" in shown.stdout
    tree = [line for line in lines if "select_experts" in line and "dispatcher, site at 1048" in line]
    assert len(tree) == 1
    below = lines[lines.index(tree[0]) :]
    grouped = next(line for line in below if "biased_grouped_topk_gpu" in line)
    flashinfer = below[below.index(grouped) + 1]
    assert "├ biased_grouped_topk_gpu" in grouped
    assert "│ ├ fused_topk_deepseek" in flashinfer
    assert flashinfer.rstrip().endswith("kernel from flashinfer.fused_moe")
    assert next(line for line in below if "└ biased_grouped_topk_impl" in line).rstrip().endswith("@torch.compile")
    assert "not judged: say what is served with --model, --gpu and --server-args" in shown.stdout


def test_a_narrow_terminal_gets_the_tree_whole(site: Path) -> None:
    """At 80 columns every row of this release fits, and none is cropped."""
    shown = terminal("inspect", "topk", "--site", site, columns=80, environ={"NO_COLOR": "1"})
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout.replace("\r", ""))
    rows = [line for line in plain.splitlines() if "├" in line or "└" in line]
    assert len(rows) >= 20
    assert [row for row in rows if len(row.rstrip()) > 80] == []
    assert "…" not in shown.stdout


def test_the_live_path_is_marked_for_a_model_that_is_said(site: Path, model: Path) -> None:
    """What surely runs for it bears the mark, and nothing else does."""
    shown = surgeon("inspect", "topk", "--site", site, "--model", model, "--gpu", "sm90")
    assert shown.code == 0
    assert "Qwen3MoeForCausalLM, k = 8" in shown.stdout
    names = [
        line.split("●")[1].replace("├", "").replace("│", "").split()[0]
        for line in shown.stdout.splitlines()
        if "●" in line
    ]
    assert names == ["live", "TopK.forward_cuda", "select_experts", "fused_topk", "topk_softmax"]


def test_json_carries_what_is_shown(site: Path, model: Path) -> None:
    """The map with roles, callers and marks, RECORD, links, the excerpt, and what was said by hand."""
    ran = surgeon("inspect", "topk", "--site", site, "--model", model, "--gpu", "12.0", "--json").json()
    result = ran["result"]
    assert ran["ok"] is True
    assert result["as_installed"] is True
    assert result["record_sha256"] == hashlib.sha256(member("0.5.9")).hexdigest()
    assert (result["gpu"], result["device"], result["by_hand"]) == ("12.0", "cuda", True)
    assert result["model"]["architecture"] == "Qwen3MoeForCausalLM"
    assert result["live_path"]["verdict"] == "reached"
    functions = {one["name"]: one for one in result["functions"]}
    fused = functions["fused_topk"]
    assert (fused["first"], fused["last"], fused["role"]) == (450, 489, "fused kernel path")
    assert fused["on_live_path"] is True
    assert {"name": "topk_softmax", "modules": ["sgl_kernel"], "role": "fused kernel", "on_live_path": True} in fused[
        "imported"
    ]
    assert functions["biased_grouped_topk_gpu"]["on_live_path"] is False
    assert functions["biased_grouped_topk_impl"]["compiled"] is True
    assert result["excerpt"]["marked"] == [1048]
    assert result["excerpt"]["lines"][4]["text"] == result["site"]["text"]


def test_an_edited_file_differs_from_record(copied: Path) -> None:
    """RECORD of the folder's own metadata is what it is held against."""
    (copied / TOPK).write_bytes(member("0.5.9") + b"# edited\n")
    shown = surgeon("inspect", "topk", "--site", copied)
    assert "differs from what was installed" in shown.stdout
    assert surgeon("inspect", "topk", "--site", copied, "--json").json()["result"]["as_installed"] is False
    shutil.rmtree(copied / "sglang-0.5.9.dist-info")
    assert surgeon("inspect", "topk", "--site", copied, "--json").json()["result"]["as_installed"] is None
    assert "says nothing of this file" in surgeon("inspect", "topk", "--site", copied).stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--gpu", "h2000"),
        ("--model", "/nowhere"),
        ("--server-args", "--moe-runner-backend nothing"),
        ("--server-args=triton",),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(site: Path, words: tuple[str, ...]) -> None:
    """Exit 2, the option named, and what to type instead."""
    ran = surgeon("inspect", "topk", "--site", site, *words, "--json")
    assert ran.code == 2
    (problem,) = ran.json()["problems"]
    assert problem["code"] == "usage"
    assert problem["where"] == words[0].partition("=")[0]
    assert problem["advice"]


def test_the_newest_release_is_asked_for_on_demand(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far behind and whether the patch fits that one too; without the option no index is asked."""
    newest = member("0.5.23")
    with local_index(tmp_path / "index") as index:
        index.add("0.5.10", newest)
        index.add("0.5.23", newest)
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("SURGEON_CACHE_DIR", str(tmp_path / "cache"))
        plain = surgeon("inspect", "topk", "--site", site, "--json").json()["result"]
        assert plain["latest"] is None
        assert index.asked == []
        shown = surgeon("inspect", "topk", "--site", site, "--check-latest")
        said = " ".join(shown.stdout.split())
        assert f"0.5.9 is 2 releases behind 0.5.23 (asked {index.url}, this machine's index)" in said
        assert "the patch fits too (line 3126, recipe before-post-process, 17 names passed)" in said
        index.status = 500
        failed = surgeon("inspect", "topk", "--site", site, "--check-latest", "--json")
    assert failed.code == 0
    assert failed.json()["result"]["latest"]["known"] is False
    assert [one["code"] for one in failed.json()["problems"]] == ["warning"]
    assert "server error" in failed.json()["problems"][0]["message"]


def test_a_node_without_a_server_takes_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """The interpreter is there and nothing is served: the model, the GPU and the arguments are said by hand."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    install_package(packages, topk=member("0.5.9"))
    monkeypatch.setenv("SURGEON_STATE_DIR", str(tmp_path / "state"))
    python = tmp_path / "venv" / "bin" / "python"
    node = ("inspect", "topk", "--host", "local", "--python", python, "--port", str(free_port()), "--json")
    plain = surgeon(*node).json()["result"]
    assert (plain["server"], plain["live_path"], plain["by_hand"]) == (None, None, False)
    assert plain["as_installed"] is True
    said = ("--model", model, "--gpu", "B200", "--server-args=--quantization fp8")
    bypassed = surgeon(*node, *said).json()["result"]
    assert bypassed["live_path"]["verdict"] == "not-reached"
    assert [one["name"] for one in bypassed["functions"] if one["on_live_path"]] == []
    reached = surgeon(*node, *said[:-1], "--server-args=--moe-runner-backend triton").json()["result"]
    assert reached["live_path"]["verdict"] == "reached"
    assert reached["by_hand"] is True
