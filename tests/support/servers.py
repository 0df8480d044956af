"""A stand-in for an installed and running sglang: real processes, a real virtual environment, faults on demand.

``FakeServer.install`` makes a virtual environment that holds a package ``sglang`` with a ``launch_server`` that serves
HTTP, a ``bench_serving`` that loads it, a ``topk.py`` (a real one from a wheel where the test gives its bytes), a
dist-info with METADATA and RECORD, and stand-ins for transformers and torch. The server is started as people start the
real one: ``nohup python -m sglang.launch_server ... >> log 2>&1 &``. Its children carry sglang's titles. Everything it
starts, restarts by surgeon included, carries its token in the environment and is ended when the test is over.

    server = FakeServer.install(tmp_path)
    server.behave(start_s=2.0)
    server.start()

The faults are read when a server starts, so ``behave`` between a start and a restart changes what the restart does.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
import venv
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

LAUNCHER = Path(__file__).with_name("fake_launch_server.py")
BENCH = Path(__file__).with_name("fake_bench_serving.py")
MARK = "FAKE_SGLANG_TOKEN"

# Enough of the real one for tests that only move its bytes about.
TOPK = b'''"""Chooses experts."""


def select_experts(hidden_states, router_logits, topk_config, *, num_token_non_padded=None):
    topk_weights, topk_ids = fused_topk(hidden_states, router_logits, topk_config.top_k)
    get_global_expert_distribution_recorder().on_select_experts(topk_ids=topk_ids)
    return StandardTopKOutput(topk_weights, topk_ids, router_logits)
'''

METADATA = """Metadata-Version: 2.4
Name: sglang
Version: {version}
Requires-Python: >=3.10
License:                                  Apache License
        
        Version: 99.9 of the licence, which is no field
Requires-Dist: transformers==4.57.1
Requires-Dist: torch==2.9.1
Requires-Dist: pytest; extra == "test"

# sglang
Requires-Dist: not-a-field
"""  # noqa: W293 - METADATA of 0.5.9 has such lines

CONFIG = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Behaviour:
    """What a fake server does from its next start on.

    Attributes:
        start_s: seconds until it listens.
        log_while_starting: whether it logs a line every 0.1 s meanwhile.
        warm_up_s: seconds after that until /health is 200.
        health: a status that /health always answers; None for the truth.
        never_listens: whether it starts for ever.
        dies: whether it logs ``die_log`` and exits with 1 instead of listening.
        die_log: the last words.
        die_on_generate: whether it dies so at the first generation.
        ignore_term: whether launcher and children ignore SIGTERM.
        linger_s: seconds for which a last thread holds the port after SIGTERM has ended the launcher's main thread.
        orphan: whether one more scheduler is started that no parent owns.
        missing_workers: how many ranks are not started.
        hang_after: how many generations are answered before all hang; None for no end.
        extra_tokens: how many tokens more (or fewer) than asked for are returned.
        nan: whether the answer holds a NaN.
        needs_ids: whether a prompt of text is refused, as without a tokenizer.
        beacons: whether ranks write beacons where topk.py calls a runtime beside it.
        beacon_hash: a hash to claim instead of the runtime's.
        beacon_applied: whether beacons say that a pass was re-routed.
        beacon_settings_problem: what beacons say of their settings.
        beacon_silent_ranks: ranks that write none.
        recordings: files that the recorder writes when it is told to, one per rank.
        patched: switches that hold only while topk.py calls the runtime beside it, over those above.
    """

    start_s: float = 0.0
    log_while_starting: bool = True
    warm_up_s: float = 0.0
    health: int | None = None
    never_listens: bool = False
    dies: bool = False
    die_log: str = "RuntimeError: it died"
    die_on_generate: bool = False
    ignore_term: bool = False
    linger_s: float = 0.0
    orphan: bool = False
    missing_workers: int = 0
    hang_after: int | None = None
    extra_tokens: int = 0
    nan: bool = False
    needs_ids: bool = False
    beacons: bool = True
    beacon_hash: str | None = None
    beacon_applied: bool = True
    beacon_settings_problem: str | None = None
    beacon_silent_ranks: tuple[int, ...] = ()
    recordings: tuple[str, ...] = ()
    patched: dict[str, Any] = field(default_factory=dict)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def install_package(
    site: Path, *, topk: bytes = TOPK, version: str = "0.5.9", record: bool = True, dist_info: bool = True
) -> Path:
    """Lay out a package ``sglang`` and its dist-info as an installer would; return the package's folder.

    Args:
        site: the site-packages folder.
        topk: the bytes of topk.py.
        version: what METADATA says.
        record: whether there is a RECORD.
        dist_info: whether there is a dist-info at all.
    """
    package = site / "sglang"
    moe = package / "srt" / "layers" / "moe"
    moe.mkdir(parents=True)
    files = {package / "launch_server.py": LAUNCHER.read_bytes(), moe / "topk.py": topk}
    files[package / "bench_serving.py"] = BENCH.read_bytes()
    for folder in (package, package / "srt", package / "srt" / "layers", moe):
        files[folder / "__init__.py"] = b""
    files[package / "_version.py"] = f'__version__ = "{version}"\n'.encode()
    if dist_info:
        info = site / f"sglang-{version}.dist-info"
        info.mkdir()
        files[info / "METADATA"] = METADATA.format(version=version).encode()
        files[info / "INSTALLER"] = b"pip\n"
        if record:
            files[info / "RECORD"] = _record(site, files)
    for path, content in files.items():
        path.write_bytes(content)
    return package


# What sglang of METADATA asks for: the versions, and as much of transformers as builds a config object.
TRANSFORMERS = """import json, os
__version__ = "{version}"


class AutoConfig:
    @staticmethod
    def from_pretrained(path, trust_remote_code=False, local_files_only=False):
        with open(os.path.join(path, "config.json")) as file:
            known = json.load(file)
        if known["model_type"] not in {knows!r}:
            raise KeyError(known["model_type"])
        return AutoConfig()
"""


def install_companions(
    site: Path, *, transformers: str = "4.57.1", knows: tuple[str, ...] = ("glm4_moe",), torch: str = "2.9.1"
) -> None:
    """Lay out stand-ins for what sglang requires; called again, it replaces them, as an installer would.

    Args:
        site: the site-packages folder.
        transformers: its version.
        knows: the model types that it can build a config of.
        torch: the version of torch, of which there is only the dist-info.
    """
    for name, version in (("transformers", transformers), ("torch", torch)):
        for old in site.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
    code = TRANSFORMERS.format(version=transformers, knows=knows)
    (site / "transformers").mkdir(exist_ok=True)
    (site / "transformers" / "__init__.py").write_text(code, encoding="utf-8")


def _record(site: Path, files: dict[Path, bytes]) -> bytes:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([path.relative_to(site).as_posix(), f"sha256={digest}", len(content)])
    return table.getvalue().encode()


@dataclass
class FakeServer:
    """An installed fake sglang, and the server that runs from it. Use it in a ``with`` statement.

    Attributes:
        root: the folder that holds everything.
        python: the environment's interpreter.
        site: its site-packages.
        port: where the server listens.
        options: further words of the launch.
        environ: further variables of the launch.
        pid: the launcher that ``start`` started; after a restart by surgeon it is another.
    """

    root: Path
    python: Path
    site: Path
    port: int
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    pid: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    behaviour: Behaviour = field(default_factory=Behaviour)

    @classmethod
    def install(
        cls,
        root: Path,
        *,
        topk: bytes = TOPK,
        version: str = "0.5.9",
        options: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        base: Path | None = None,
    ) -> Self:
        """Make an environment with sglang in it and a model beside it; nothing is started.

        Args:
            root: an empty or missing folder.
            topk: the bytes of topk.py.
            version: sglang's version.
            options: further words of the launch, such as ``--tp 2``.
            environ: further variables of the launch.
            base: the interpreter of the environment; None for the one that runs the tests.
        """
        if base is None:
            venv.create(root / "venv", with_pip=False, symlinks=True)
        else:
            subprocess.run([base, "-m", "venv", "--without-pip", root / "venv"], check=True)
        python = root / "venv" / "bin" / "python"
        (site,) = (root / "venv" / "lib").glob("python3*/site-packages")
        install_package(site, topk=topk, version=version)
        install_companions(site)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        server = cls(root, python, site, free_port(), options, dict(environ or {}))
        server.behave()
        return server

    @property
    def package(self) -> Path:
        """The folder of the package."""
        return self.site / "sglang"

    @property
    def topk(self) -> Path:
        """The file that surgeon cuts."""
        return self.package / "srt" / "layers" / "moe" / "topk.py"

    @property
    def model(self) -> Path:
        """The model's folder."""
        return self.root / "model"

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.root / "server.log"

    @property
    def argv(self) -> list[str]:
        """Its command line."""
        served = ["--model-path", str(self.model), "--port", str(self.port)]
        return [str(self.python), "-m", "sglang.launch_server", *served, *self.options]

    def behave(self, **switches: Any) -> None:
        """Change what the next start does; switches that are not named keep their values."""
        self.behaviour = replace(self.behaviour, **switches)
        (self.root / "behaviour.json").write_text(json.dumps(asdict(self.behaviour)), encoding="utf-8")

    def variables(self) -> dict[str, str]:
        """Return the environment it is started in."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        token = {MARK: self.token, "FAKE_SGLANG": str(self.root / "behaviour.json")}
        return {**kept, **token, "PYTHONDONTWRITEBYTECODE": "1", **self.environ}

    def start(self, *, wait: bool = True, script: str = 'nohup "$@" >> "$LOG" 2>&1 </dev/null & echo $!') -> int:
        """Start it in the background from a shell, as people do, and return the launcher's pid.

        Args:
            wait: whether to wait until it listens.
            script: the shell's words; ``$@`` is the command line, ``$LOG`` the log.
        """
        started = subprocess.run(
            ["/bin/sh", "-c", script, "sh", *self.argv],
            env={**self.variables(), "LOG": str(self.log)},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            check=True,
        )
        self.pid = int(started.stdout)
        if wait:
            self.wait_listening()
        return self.pid

    def wait_listening(self, timeout_s: float = 20.0) -> None:
        """Wait until it can be connected to."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.05)
        raise AssertionError(f"the fake server does not listen:\n{self.said()}")

    def said(self) -> str:
        """Return its log."""
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def pids(self) -> list[int]:
        """Return every living process that carries its token: what it started, and what was restarted from it."""
        mark = f"{MARK}={self.token}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                zombie = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
                if not zombie and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def end(self) -> None:
        """End every process of it, however it was started."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End every process of it."""
        self.end()
