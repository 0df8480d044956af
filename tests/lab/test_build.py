"""What an environment is made of, and where torch comes from; with real pip and real wheels of nothing."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from surgeon.errors import SurgeonError
from surgeon.lab import build, pip
from surgeon.lab.paths import paths
from surgeon.lab.progress import Silent
from surgeon.lab.recipes import RECIPES, requirements
from surgeon.registry import wheels

METADATA = """\
Metadata-Version: 2.1
Name: sglang
Version: 9.9
Requires-Dist: openai==2.8.0
Requires-Dist: llguidance<2.0.0,>=1.7.6
Requires-Dist: numpy
Requires-Dist: xxhash; python_version < "3.12"
Requires-Dist: torch==2.14.1
Requires-Dist: flashinfer_python[cu13]==0.7.2
Requires-Dist: partial-json-parser
Requires-Dist: pillow; extra == "diffusion"

A text that is no header: Requires-Dist: tqdm
"""


class Notes(Silent):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str, /) -> None:
        """Keep it."""
        self.told.append(text)


def make_wheel(folder: Path, name: str, version: str, *requires: str, metadata: str = "") -> Path:
    """A wheel that pip accepts and that holds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", *(f"Requires-Dist: {r}\n" for r in requires)]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{info}/METADATA", metadata or "".join(lines))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip finds anything."""
    folder = tmp_path / "shelf"
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("SURGEON_TORCH_INDEX", raising=False)
    make_wheel(folder, "numpy", "2.3.0")
    return folder


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has pip."""
    folder: Path = tmp_path_factory.mktemp("tool") / "venv"
    pip.make_venv(Path(sys.executable), folder)
    return folder / "bin" / "python"


def test_sglangs_own_limits_are_kept_and_what_needs_a_gpu_is_left_out(tmp_path: Path) -> None:
    """Only what the server imports on a CPU remains, in the versions that the release asks for."""
    info = tmp_path / "sglang-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA, encoding="utf-8")
    common = ["openai==2.8.0", "llguidance<2.0.0,>=1.7.6", "numpy"]
    assert requirements(tmp_path, "3.11") == [*common, "xxhash", "partial-json-parser"]
    assert requirements(tmp_path, "3.12") == [*common, "partial-json-parser"]


def test_an_environment_of_another_recipe_or_python_is_another_one() -> None:
    """The name of an environment changes with all that it is made from, and with nothing else."""
    digests = {one.digest(python) for one in RECIPES.values() for python in ("3.11", "3.12")}
    assert len(digests) == 2 * len(RECIPES)
    assert RECIPES["0.5.23"].digest("3.11") == RECIPES["0.5.23"].digest("3.11")


def test_a_cpu_torch_that_pip_finds_by_itself_is_taken(shelf: Path, tool: Path, cache: Path) -> None:
    """No index is added where pip's own answer is a CPU build."""
    cache.mkdir()
    make_wheel(shelf, "torch", "2.13.0+cpu", "numpy")
    notes = Notes()
    assert "--extra-index-url" not in build._torch_arguments(tool, notes)
    assert notes.told == ["torch 2.13.0+cpu comes from this machine's disk"]


def test_a_cuda_torch_is_replaced_by_the_cpu_one(shelf: Path, tool: Path, cache: Path) -> None:
    """Where pip would bring nvidia packages, torch comes from PyTorch's CPU index, and that is said first."""
    cache.mkdir()
    make_wheel(shelf, "nvidia_cublas", "13.0")
    make_wheel(shelf, "torch", "2.13.0", "nvidia-cublas")
    notes = Notes()
    assert build._torch_arguments(tool, notes)[-2:] == ("--extra-index-url", build.CPU_INDEX)
    assert "CUDA torch of several GB" in notes.told[0]


def test_another_torch_index_can_be_named(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SURGEON_TORCH_INDEX decides, and pip is not asked."""
    monkeypatch.setenv("SURGEON_TORCH_INDEX", "http://mirror.invalid/cpu")
    assert build._torch_arguments(tool, Silent())[-1] == "http://mirror.invalid/cpu"


def test_what_a_pth_file_shows_is_installed_for_pip(shelf: Path, tool: Path, tmp_path: Path) -> None:
    """The shared torch satisfies an environment's requirements, so nothing is fetched twice."""
    layer = tmp_path / "layer"
    make_wheel(shelf, "torch", "2.13.0+cpu", "numpy")
    pip.run(tool, ["install", "--target", str(layer), "torch==2.13.0"], what="the layer")
    (site,) = tool.parent.parent.glob("lib/python3*/site-packages")
    (site / "layer.pth").write_text(f"{layer}\n", encoding="utf-8")
    for wheel in shelf.glob("*.whl"):
        wheel.unlink()
    pip.run(tool, ["install", "torch==2.13.0"], what="again, with an empty shelf")
    assert not (site / "torch").exists()


@pytest.mark.usefixtures("no_index")
def test_pip_s_last_words_are_in_the_error(tool: Path) -> None:
    """A package that cannot be had is an error that tells what pip said and what to run by hand."""
    with pytest.raises(SurgeonError, match=r"the reason: pip failed: .*surgeon-no-such-thing") as failed:
        pip.run(tool, ["install", "surgeon-no-such-thing"], what="the reason")
    assert "surgeon-no-such-thing" in failed.value.advice


@pytest.mark.usefixtures("no_index")
def test_a_cached_wheel_needs_no_network(cache: Path) -> None:
    """What was fetched once is given and unpacked again without asking anybody."""
    wheel = make_wheel(paths().wheels, "sglang", "9.9", metadata=METADATA)
    assert wheels.fetch("9.9") == wheel
    unpacked = wheels.unpack("9.9")
    assert (unpacked / "sglang" / "__init__.py").exists()
    assert wheels.unpack("9.9") == unpacked
    assert unpacked.is_relative_to(cache)


@pytest.mark.usefixtures("cache", "no_index")
def test_a_wheel_that_cannot_be_had_is_an_error_and_leaves_nothing() -> None:
    """No network: the error names the release, and no half-made file is left behind."""
    with pytest.raises(SurgeonError, match=r"wheel of sglang 9\.8"):
        wheels.fetch("9.8")
    assert list(paths().wheels.iterdir()) == []
