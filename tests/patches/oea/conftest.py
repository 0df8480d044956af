"""The OEA runtime, loaded as a node loads it: copies of its files in one package, beside the settings."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from surgeon import lab

if TYPE_CHECKING:
    from collections.abc import Callable

# Batches here are tiny: threads that wait for one another on a busy machine cost more than the arithmetic.
torch.set_num_threads(1)

PATCH = Path(__file__).parents[3] / "patches" / "oea"

_SERIAL = count()

# A batch that sglang could have routed: rows of 32 experts, 4 chosen each.
PROLOGUE = """
import json, os, sys, torch
torch.set_num_threads(1)
from moe import _surgeon_oea as oea
def step(rows, layer_id=None, **names):
    logits = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    weights, ids = logits.softmax(-1).topk(4)
    weights = weights / weights.sum(-1, keepdim=True)
    return oea.route(weights, ids.int(), logits, top_k=4, layer_id=layer_id, **names)
def beacon():
    with open(os.path.join(os.path.dirname(oea.__file__), "beacons", f"{os.getpid()}.json")) as file:
        return json.load(file)
"""


@dataclass(frozen=True)
class Installed:
    """A folder with the runtime and its settings."""

    folder: Path

    @property
    def settings(self) -> Path:
        """The settings file."""
        return self.folder / "_surgeon_oea.json"

    @property
    def beacons(self) -> Path:
        """Where beacons go."""
        return self.folder / "beacons"

    def write(self, **settings: Any) -> None:
        """Put these settings in force for processes that start, or offer them to those that run."""
        body = {
            "schema": "surgeon/oea-settings/1",
            "generation": 1,
            "beacon_dir": str(self.beacons),
            **settings,
        }
        partial = self.folder / "settings.partial"
        partial.write_text(json.dumps(body))
        partial.chmod(0o600)
        partial.replace(self.settings)

    def start(self, code: str, **environ: str) -> subprocess.Popen[str]:
        """Start a process of the interpreter that imports the runtime, as sglang's workers do, and runs the code."""
        inherited = {name: value for name, value in os.environ.items() if name != "SGLANG_OEA_K0"}
        return subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + code],
            cwd=self.folder,
            env={
                **inherited,
                "PYTHONPATH": os.pathsep.join((str(self.folder.parent), str(lab.torch_layer()))),
                "PYTHONDONTWRITEBYTECODE": "1",
                **environ,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, **environ: str) -> Ended:
        """Run such a process to its end."""
        with self.start(code, **environ) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return Ended(process.pid, out, err)


@dataclass(frozen=True)
class Ended:
    """A process that has ended well."""

    pid: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        """What it printed, read as JSON."""
        return json.loads(self.out)


def _install(folder: Path, **settings: Any) -> Installed:
    folder.mkdir(exist_ok=True)
    installed = Installed(folder)
    (folder / "_surgeon_oea.py").write_bytes((PATCH / "runtime.py").read_bytes())
    for module, file in tomllib.loads((PATCH / "patch.toml").read_text())["modules"].items():
        (folder / f"{module}.py").write_bytes((PATCH / file).read_bytes())
    installed.write(**settings)
    return installed


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Installed]:
    """Put the runtime and these settings into a package of their own, as surgeon does."""
    return lambda **settings: _install(tmp_path / "moe", **settings)


def _load(folder: Path) -> ModuleType:
    """The runtime of that folder, as a module of its own however often it is loaded."""
    package = ModuleType(f"oea_{next(_SERIAL)}")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("SGLANG_OEA_K0", raising=False)
        return importlib.import_module(f"{package.__name__}._surgeon_oea")


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModuleType]:
    """Load the runtime with these settings into this process; the same settings give the same module."""
    loaded: dict[str, ModuleType] = {}

    def runtime(**settings: Any) -> ModuleType:
        key = json.dumps(settings, sort_keys=True)
        if key not in loaded:
            loaded[key] = _load(_install(tmp_path_factory.mktemp("oea"), **settings).folder)
        return loaded[key]

    return runtime


@pytest.fixture
def fresh(install: Callable[..., Installed]) -> Callable[..., ModuleType]:
    """Load a runtime that has seen nothing yet; its thread does not run, `arm` does by hand what it would do."""

    def runtime(**settings: Any) -> ModuleType:
        found = _load(install(**settings).folder)
        found._WATCH._started = True
        return found

    return runtime


@pytest.fixture
def rank() -> Callable[[Installed], ModuleType]:
    """Load one more rank of a server: the installed files again, its thread running."""
    return lambda installed: _load(installed.folder)


@pytest.fixture(scope="session")
def operator(load: Callable[..., ModuleType]) -> ModuleType:
    """The operator in torch form."""
    found: ModuleType = load()._operator
    return found


@pytest.fixture(scope="session")
def obey() -> Callable[..., None]:
    """Put these settings, over the defaults, into force in a loaded runtime at once."""

    def put(runtime: ModuleType, **settings: Any) -> None:
        now = runtime._NOW
        now._hold(runtime._settings.Loaded(runtime._settings.Settings(**settings), "file", None))
        now.policy = torch.tensor(now.table)

    return put
