"""``surgeon predict oea`` and ``surgeon record routing`` as people and programs meet them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from tests.support import recordings
from tests.support.cli import process, surgeon, terminal
from tests.support.servers import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GLM_5 = ("predict", "oea", "--model", "GLM-5-NVFP4", "--gpu", "rtx-pro-6000", "--tp", "8")
FLAG = ("--expert-distribution-recorder-mode", "per_pass")


def test_the_answer_says_numbers_verdict_and_caveats() -> None:
    """No node is needed: where everything comes from, a row per batch size, a sentence per k0."""
    said = surgeon(*GLM_5, "--batch", "8,16", "--k0", "4")
    assert said.code == 0, said.stderr
    words = " ".join(said.stdout.split())
    assert "75 layers route 8 of 256 experts per token; 2.65 MB per expert and GPU (nvfp4)" in words
    assert "measured: rtx-pro-6000, flashinfer_cutlass nvfp4" in words
    assert "fitted to a published curve" in words
    assert [line.split()[0] for line in said.stdout.splitlines() if line[:2] in {" 8", "16"}] == ["8", "16"]
    assert "k0 = 4 pays from 4 requests in the batch on" in words
    assert "so the saving is a ceiling" in words
    assert "quality is not predicted" in words


def test_json_is_one_object_of_the_contract() -> None:
    """The same numbers for programs."""
    body = surgeon(*GLM_5, "--batch", "1,16", "--k0", "4", "--routing", "free", "--json").json()
    assert (body["schema"], body["ok"]) == ("surgeon/predict-oea/1", True)
    result = body["result"]
    assert (result["change_of"], result["layer"]["kind"], result["routing"]["us"]) == ("step", "measured", 0.0)
    one, sixteen = result["k0"]["4"]["batches"]
    assert (one["batch"], one["time_change"]) == (1, 0.0)
    assert sixteen["active_experts"] == pytest.approx(57.0, abs=0.05)
    assert sixteen["time_change"] == pytest.approx(-0.21, abs=0.005)
    assert result["native"][1]["tok_s"] == pytest.approx(427.4, rel=0.025)
    assert result["rerouted_by_default"] == [3, 64]


def test_the_plot_is_written_where_it_was_asked_for(home: Path) -> None:
    """A picture that says what it is."""
    assert surgeon(*GLM_5, "--svg", "plot.svg", "--json").json()["ok"]
    root = ET.parse(home / "plot.svg").getroot()  # noqa: S314 - our own picture
    assert "predicted, not measured" in "".join(root.itertext())
    refused = surgeon(*GLM_5, "--svg", home / "absent" / "plot.svg")
    assert refused.code == 2
    assert "cannot be written" in refused.stderr


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--model", "nobody/knows"), 2, "models that surgeon knows"),
        (("--model", "GLM-5-NVFP4"), 2, "no GPU is named"),
        (("--model", "GLM-5-NVFP4", "--gpu", "rtx-4090"), 4, "no measured layer times for the GPU 'rtx-4090'"),
        (("--model", "GLM-5-NVFP4", "--gpu", "h100"), 4, "measured there: bf16 triton"),
        (("--model", "GLM-5", "--recipe", "r"), 2, "expected one of them"),
        (("--model", "GLM-5-NVFP4", "--gpu", "b200", "--k0", "9"), 2, "k0 is 9"),
        (("--model", "GLM-5-NVFP4", "--gpu", "b200", "--batch", "1,x"), 2, "expected whole numbers"),
        (("--model", "GLM-5-NVFP4", "--gpu", "b200", "--routing", "magic"), 2, "unfused, fused or free"),
        (("--model", "GLM-5-NVFP4", "--gpu", "b200", "--from-recording", "none.pt"), 2, "cannot be read"),
        ((), 2, "no node is named"),
    ],
)
def test_a_refusal_says_what_was_expected(words: tuple[str, ...], code: int, reason: str) -> None:
    """With the exit code of its kind, for people and in JSON."""
    said = surgeon("predict", "oea", *words)
    assert (said.code, said.stdout) == (code, "")
    assert reason in " ".join(said.stderr.split())
    body = surgeon("predict", "oea", *words, "--json").json()
    assert (body["ok"], reason in body["problems"][-1]["message"]) == (False, True)


def test_a_narrow_terminal_loses_no_number() -> None:
    """Sixty columns: every percentage is still there."""
    said = terminal(*GLM_5, "--batch", "16", "--k0", "4", columns=60, environ={"NO_COLOR": "1"})
    assert said.code == 0
    assert "-15.4 %" in said.stdout
    assert "-15 %" in said.stdout or "15 % less" in " ".join(said.stdout.split())


def test_help_needs_none_of_it() -> None:
    """`--help` imports neither the tables nor the parser of recordings."""
    for words in (("predict", "oea"), ("record", "routing")):
        code = (
            f"import sys; from surgeon.cli import main; sys.argv = ['surgeon', {', '.join(map(repr, words))}, '--help']"
        )
        code += "\ntry: main()\nexcept SystemExit: pass\n"
        code += (
            "print('LOADED', sorted(m for m in sys.modules if m.startswith(('surgeon.bench', 'surgeon.operations'))))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert "LOADED []" in done.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of one pass of 4 rows."""
    folder = tmp_path_factory.mktemp("files")
    layer = [1] * 32 + [0] * 32
    recordings.write(folder, [[[0] * 64, layer, layer]], rows=(4,), modes=(2,))
    return folder


@pytest.fixture
def recorded(tmp_path: Path, files: Path) -> Iterator[FakeServer]:
    """A server on this machine whose recorder writes one of them."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    environ = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(folder)}
    with FakeServer.install(tmp_path / "fake", version="0.5.23", options=FLAG, environ=environ) as server:
        server.behave(recordings=(str(files / "per_pass.pt"),))
        server.start()
        yield server


def test_what_was_recorded_is_shown_kept_and_predicted_from(recorded: FakeServer, home: Path, tmp_path: Path) -> None:
    """The table and its verdict; the file goes into a prediction for the same server."""
    node = ("--host", "local", "--port", str(recorded.port))
    environ = {"SURGEON_STATE_DIR": str(tmp_path / "state")}
    said = process("record", "routing", *node, "--seconds", "0.2", "--out", "kept.pt", environ=environ, cwd=home)
    assert said.code == 0, said.stderr
    assert "1 of 1 recorded passes decode, 4 rows; top-8 of 64 experts in 2 layers (per_pass)" in said.stdout
    words = " ".join(said.stdout.split())
    assert "4 1 32.0 26.5 " in words
    assert "At 4 rows a layer reads 32.0 experts, 121 % of what uniform routing would" in words
    assert (home / "kept.pt").is_file()
    assert list((tmp_path / "recorded").iterdir()) == []

    cost = ("--b-us", "2", "--c-us", "20", "--routing", "free", "--batch", "4", "--k0", "4", "--json")
    told = process("predict", "oea", *node, *cost, "--from-recording", "kept.pt", environ=environ, cwd=home).json()
    assert told["result"]["native"][0]["active_experts"] == 32.0
    assert told["result"]["model"]["layers"] == 2
    assert "recorded shares" in " ".join(told["result"]["caveats"])


def test_json_of_a_recording_is_one_object_of_the_contract(recorded: FakeServer, tmp_path: Path) -> None:
    """Per batch size and per layer."""
    environ = {"SURGEON_STATE_DIR": str(tmp_path / "state")}
    words = ("--host", "local", "--port", str(recorded.port), "--seconds", "0.2", "--json")
    body = process("record", "routing", *words, environ=environ).json()
    assert (body["schema"], body["ok"]) == ("surgeon/record-routing/1", True)
    assert body["result"]["batches"][0]["active"] == 32.0
    assert [layer["unused"] for layer in body["result"]["layers"]] == [32, 32]


def test_a_place_that_cannot_be_written_is_refused_before_the_server_is_troubled(home: Path) -> None:
    """Nothing is asked of any node."""
    refused = surgeon("record", "routing", "--host", "nowhere.invalid", "--out", home / "absent" / "kept.pt")
    assert refused.code == 2
    assert "cannot be written" in refused.stderr
    assert list(home.iterdir()) == []
