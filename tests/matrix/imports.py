"""Imports a release's own modules with the graft in them, by the interpreter of one of the CPU lab's environments.

An environment has what one release of sglang needs; another release may need something else. Then the wheel as it is
must fail in the very same words, or the graft is to blame.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from packaging.version import Version

from surgeon import patches
from surgeon.lab.paths import paths
from surgeon.registry.wheels import fetch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from surgeon.surgery import Grafted

_IMPORTER = Path(__file__).with_name("importer.py")
# As a server imports them: the runner of the model first. The runtime lies beside topk.py.
MODULES = ("sglang.srt.model_executor.model_runner", "sglang.srt.layers.moe.topk")


@dataclass(frozen=True)
class Imported:
    """What became of importing one release.

    Attributes:
        environment: the lab's environment it was tried in; empty if none is built.
        modules: which modules were imported with the graft in.
        missing: what stopped the rest, with and without the graft.
        problem: what is wrong; empty if nothing is.
    """

    environment: str = ""
    modules: tuple[str, ...] = ()
    missing: str = ""
    problem: str = ""

    def __str__(self) -> str:
        """For the table."""
        if self.problem:
            return f"WRONG: {self.problem}"
        if not self.environment:
            return "no lab"
        names = " and ".join(module.rpartition(".")[2] for module in reversed(self.modules))
        return f"{names or 'no'}{f' (the wheel alone fails so too: {self.missing})' if self.missing else ''}"


def environments() -> dict[str, Path]:
    """The interpreters of the lab's environments that are built, by the release they are for."""
    made = sorted(paths().lab.glob("env-*/complete.json"))
    return {mark.parent.name.split("-")[1]: mark.parent / "bin" / "python" for mark in made}


class Importers:
    """One interpreter per environment, started when it is first needed; a context that ends them."""

    def __init__(self) -> None:
        self._found = environments()
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.communicate()

    def try_release(self, release: str, grafts: Sequence[Grafted]) -> Imported:
        """Put the grafts, the runtime and its settings into the release's files, and import them.

        Args:
            release: the release.
            grafts: what `surgeon apply` would write.
        """
        best = Imported()
        for environment in sorted(self._found, key=lambda known: _distance(known, release)):
            imported = self._try(environment, release, grafts)
            if imported.problem or len(imported.modules) == len(MODULES):
                return imported
            best = imported if not best.environment or len(imported.modules) > len(best.modules) else best
        return best

    def _try(self, chosen: str, release: str, grafts: Sequence[Grafted]) -> Imported:
        with _unpacked(release) as root:
            beside = _beside()
            _write(root, {grafted.spec.place.file: grafted.result for grafted in grafts} | beside)
            with_graft = self._ask(chosen, root)
            done = tuple(module for module in MODULES if not with_graft[module])
            if len(done) == len(MODULES):
                return Imported(chosen, done)
            _write(root, {grafted.spec.place.file: grafted.source for grafted in grafts})
            for name in beside:
                (root / "sglang" / name).unlink()
            without = self._ask(chosen, root)
        for module in MODULES:
            if with_graft[module] != without[module]:
                words = f"{with_graft[module] or 'imported'}; the wheel alone: {without[module] or 'imported'}"
                return Imported(chosen, done, problem=words)
        return Imported(chosen, done, missing=next(words for words in without.values() if words))

    def _ask(self, environment: str, root: Path) -> dict[str, str]:
        """What stopped each module; empty where nothing did."""
        if environment not in self._running:
            self._running[environment] = subprocess.Popen(
                [str(self._found[environment]), str(_IMPORTER), *MODULES],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            )
        process = self._running[environment]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{root}\n")
        process.stdin.flush()
        for line in process.stdout:
            # Some packages greet on import.
            if line.startswith("{"):
                answer: dict[str, str] = json.loads(line)
                return answer
        message = f"the importer of sglang {environment}'s environment ended with {process.wait()}"
        raise RuntimeError(message)


def _distance(known: str, release: str) -> tuple[bool, int]:
    """How far an environment's release is from another: the next later one first."""
    mine, theirs = ((*Version(version).release, 0, 0) for version in (known, release))
    return mine < theirs, abs((mine[1] - theirs[1]) * 1000 + mine[2] - theirs[2])


@contextmanager
def _unpacked(release: str) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix=f"sglang-{release}-"))
    try:
        with zipfile.ZipFile(fetch(release)) as archive:
            archive.extractall(root)
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _beside() -> dict[str, bytes]:
    """The files that a plan puts beside topk.py: every module of the patch, and the settings."""
    oea = patches.load("oea")
    folder = oea.package.removeprefix("sglang.").replace(".", "/")
    settings = oea.settings_file(oea.settings, generation=1, beacon_dir="")
    return {f"{folder}/{one.name}.py": one.content for one in oea.shipped} | {f"{folder}/{oea.module}.json": settings}


def _write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = root / "sglang" / name
        path.write_bytes(content)
        path.chmod(0o600)
