"""Builds what the lab runs from: the shared torch layer, one environment per sglang release, and the models.

Measured on Linux x86-64, Python 3.11, two cores that were busy with other work, packages from a near mirror:

=============================  =======  =======
part                           disk     time
=============================  =======  =======
torch 2.13.0 CPU, shared       0.86 GB  22 s
triton 3.9.0, shared           1.00 GB  11 s
environment of sglang 0.5.23   1.22 GB  110 s
environment of sglang 0.5.9    0.90 GB  130 s
model                          0.04 GB  20-55 s
wheel of sglang                0.04 GB  2 s
=============================  =======  =======

The server then starts in 40 to 110 s, by how busy the machine is.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from surgeon.errors import SurgeonError
from surgeon.lab import pip, preflight
from surgeon.lab.paths import locked, paths
from surgeon.lab.progress import Silent
from surgeon.lab.recipes import TORCH, TRITON, Recipe, recipe, requirements
from surgeon.registry import wheels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.lab.preflight import Interpreter
    from surgeon.lab.progress import Progress

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU wheels; ``SURGEON_TORCH_INDEX`` names another."""

# What each part takes on disk (bytes), as measured above.
_DISK = {"torch": 860_000_000, "triton": 1_000_000_000, "environment": 1_300_000_000, "model": 42_000_000}
_UNPACKING = 500_000_000
_MARK = "complete.json"
_SHIMS = Path(__file__).with_name("shims.py")
_WRITER = Path(__file__).with_name("tiny_model.py")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one sglang release in it.

    Attributes:
        folder: the virtual environment.
        recipe: what it was built from.
        reused: whether it was there already.
    """

    folder: Path
    recipe: Recipe
    reused: bool

    @property
    def python(self) -> Path:
        """Its interpreter, by the path a user would type."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where its packages are."""
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found


@dataclass(frozen=True)
class Model:
    """A model on disk.

    Attributes:
        folder: what ``--model-path`` names.
        reused: whether it was there already.
    """

    folder: Path
    reused: bool


def torch_layer(python: Path | None = None, *, progress: Progress | None = None) -> Path:
    """A folder with a CPU torch and what it requires, to be put on ``sys.path``; built on first use.

    Args:
        python: the interpreter that it is for; None for the one behind the running interpreter, or the
            first along PATH, that has a version which torch has wheels for.
        progress: who follows the work.

    Returns:
        The folder. Many environments share it, so nobody may write there.

    Raises:
        SurgeonError: it could not be built.
    """
    return _layer("torch", preflight.choose_python(recipe("0.5.9"), python), progress or Silent())


def triton_layer(python: Path | None = None, *, progress: Progress | None = None) -> Path:
    """A folder with Triton, which also needs what :func:`torch_layer` holds; arguments and errors as there."""
    return _layer("triton", preflight.choose_python(recipe("0.5.9"), python), progress or Silent())


def environment(release: Recipe, interpreter: Interpreter, *, progress: Progress) -> Environment:
    """The environment of one release, built unless a complete one is there.

    Args:
        release: what to build.
        interpreter: what to build it from.
        progress: who follows the work.

    Raises:
        SurgeonError: the machine cannot do it, or a download failed.
    """
    folder = paths().lab / f"env-{release.sglang}-{release.digest(interpreter.text)}"
    with locked(folder.name, waiting=lambda: progress.note("Waiting for another surgeon to build the lab")):
        reused = (folder / _MARK).exists()
        if not reused:
            _require(folder, interpreter, progress)
            layers = [_layer(name, interpreter, progress) for name in ("torch", "triton")]
            _build(folder, release, interpreter, layers, progress)
        made = Environment(folder, release, reused)
        _install_shims(made)
    return made


def restore(made: Environment, *, progress: Progress) -> None:
    """Put sglang back to what its wheel holds, with nothing beside it.

    Args:
        made: the environment.
        progress: who follows the work.

    Raises:
        SurgeonError: pip failed.
    """
    with progress.step(f"Restoring sglang {made.recipe.sglang} from its wheel"):
        for leftover in made.site_packages.glob("sglang*"):
            shutil.rmtree(leftover)
        _install_sglang(made.python, made.recipe.sglang)


def model(made: Environment, *, seed: int, bias: float, progress: Progress) -> Model:
    """The random model for one environment, written unless it is there.

    Args:
        made: the environment whose transformers writes it, since releases read different configurations.
        seed: of the weights.
        bias: standard deviation of the routing rule's correction bias.
        progress: who follows the work.

    Raises:
        SurgeonError: the writer failed.
    """
    content = hashlib.sha256(_WRITER.read_bytes() + made.folder.name.encode()).hexdigest()[:8]
    folder = paths().models / f"tiny-glm4-moe-seed{seed}-bias{bias:g}-{content}"
    with locked(folder.name):
        if folder.is_dir():
            return Model(folder, reused=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with progress.step(f"Writing a random model (seed {seed}, correction bias {bias:g})"):
            temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
            try:
                command = [
                    *(str(made.python), "-I", str(_WRITER), str(temporary)),
                    *("--seed", str(seed), "--bias", str(bias)),
                ]
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
                )
                if done.returncode != 0:
                    last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
                    raise SurgeonError(f"The model could not be written: {last[0]}", where=str(folder))
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return Model(folder, reused=False)


def _layer_folder(name: str, interpreter: Interpreter) -> Path:
    version = {"torch": TORCH, "triton": TRITON}[name][0].partition("==")[2]
    return paths().torch / f"{name}-{version}-cpu-py{interpreter.text}-{platform.machine()}"


def _layer(name: str, interpreter: Interpreter, progress: Progress) -> Path:
    folder = _layer_folder(name, interpreter)
    with locked(folder.name, waiting=lambda: progress.note(f"Waiting for another surgeon to fetch {name}")):
        if folder.is_dir():
            return folder
        preflight.require_disk(folder, _DISK[name] + _UNPACKING)
        tool = pip.tool(interpreter.path, interpreter.text)
        wanted = ("--no-deps", *TRITON) if name == "triton" else _torch_arguments(tool, progress)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with progress.step(f"Fetching {name} ({_DISK[name] / 1e9:.1f} GB on disk)"):
            temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}-"))
            try:
                arguments = ("install", "--no-compile", "--only-binary=:all:", "--target", str(temporary), *wanted)
                pip.run(tool, arguments, what=f"Fetching {name}")
                temporary.chmod(0o755)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _torch_arguments(tool: Path, progress: Progress) -> tuple[str, ...]:
    """Requirements for a CPU torch, with PyTorch's own index if pip would otherwise take a CUDA build."""
    chosen = os.environ.get("SURGEON_TORCH_INDEX")
    if chosen:
        return (*TORCH, "--extra-index-url", chosen)
    brought = pip.plan(tool, TORCH)
    names = {canonicalize_name(item["metadata"]["name"]) for item in brought}
    if any(name.startswith(("nvidia-", "cuda-")) for name in names):
        progress.note(f"pip's own index would bring a CUDA torch of several GB; taking torch from {CPU_INDEX}")
        return (*TORCH, "--extra-index-url", CPU_INDEX)
    (torch,) = (item for item in brought if item["metadata"]["name"] == "torch")
    where = "this machine's disk" if torch["download_info"]["url"].startswith("file:") else "pip's own index"
    progress.note(f"torch {torch['metadata']['version']} comes from {where}")
    return TORCH


def _require(folder: Path, interpreter: Interpreter, progress: Progress) -> None:
    missing = ["environment", "model"]
    missing += [name for name in ("torch", "triton") if not _layer_folder(name, interpreter).is_dir()]
    needed = sum(_DISK[name] for name in missing) + _UNPACKING
    preflight.require_disk(folder, needed)
    with progress.step("Asking the package index"):
        preflight.require_index(interpreter.path, interpreter.text)
    progress.note(
        f"To build: {', '.join(missing)}. {sum(_DISK[name] for name in missing) / 1e9:.1f} GB on disk, "
        f"less than half of it to download, in {paths().root}"
    )


def _build(folder: Path, release: Recipe, interpreter: Interpreter, layers: Sequence[Path], progress: Progress) -> None:
    made = Environment(folder, release, reused=False)
    with progress.step(f"Making an environment for sglang {release.sglang}"):
        pip.make_venv(interpreter.path, folder)
        # pip counts what a .pth file shows as installed, and never touches what lies outside the environment.
        lines = "".join(f"{layer}\n" for layer in layers)
        (made.site_packages / "surgeon_lab_layers.pth").write_text(lines, encoding="utf-8")
    with progress.step(f"Fetching the wheel of sglang {release.sglang}"):
        asked = requirements(wheels.unpack(release.sglang), interpreter.text)
    install = ("install", "--only-binary=:all:", "--no-compile")
    with progress.step("Installing what sglang's server imports"):
        pip.run(made.python, (*install, *asked), what="Installing sglang's requirements")
        pip.run(made.python, (*install, "--no-deps", *release.alone), what=f"Installing {release.alone[0]}")
    with progress.step(f"Installing sglang {release.sglang}"):
        _install_sglang(made.python, release.sglang)
    mark = {"sglang": release.sglang, "python": interpreter.text, "layers": [str(layer) for layer in layers]}
    (folder / _MARK).write_text(json.dumps(mark), encoding="utf-8")


def _install_sglang(python: Path, sglang: str) -> None:
    arguments = ("install", "--no-index", "--no-deps", "--force-reinstall", str(wheels.fetch(sglang)))
    pip.run(python, arguments, what=f"Installing sglang {sglang}")


def _install_shims(made: Environment) -> None:
    """Keep the shims of an old environment as new as this surgeon."""
    shims = made.site_packages / "surgeon_lab_shims.py"
    wanted = _SHIMS.read_bytes()
    if not shims.exists() or shims.read_bytes() != wanted:
        shims.write_bytes(wanted)
    # A .pth line, not sitecustomize: where the system's Python has one of those, it hides an environment's.
    (made.site_packages / "surgeon_lab_shims.pth").write_text("import surgeon_lab_shims\n", encoding="utf-8")
