"""A stand-in for an installed and running sglang: real processes, a real virtual environment, faults on demand.

``FakeServer.install`` makes a virtual environment that holds a package ``sglang`` with a ``launch_server`` that serves
HTTP, a ``bench_serving`` that loads it, a ``topk.py`` (a real one from a wheel where the test gives its bytes), a
dist-info with METADATA and RECORD, and stand-ins for transformers and torch. The server is started as people start the
real one: ``nohup python -m sglang.launch_server ... >> log 2>&1 &``. Its children carry sglang's titles. Everything it
starts, restarts by surgeon included, carries its token in the environment and is ended when the test is over.

    server = FakeServer.install(tmp_path)
    server.behave(start_s=2.0)
    server.start()

Most faults are read when a server starts, so ``behave`` between a start and a restart changes what the restart does;
those of a change of settings are read when they matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import venv
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.packages import TOPK, install_companions, install_package

if TYPE_CHECKING:
    from types import TracebackType

MARK = "FAKE_SGLANG_TOKEN"

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
        loads: the endpoint that tells the load; None for a release that has none. This and all below is read anew
            whenever it matters, so that it can be switched while the server runs.
        requests: how many requests are running, as that endpoint says.
        passes_a_second: forward passes of requests that never end.
        deaf_ranks: ranks that do not read new settings.
        refusing_ranks: why a rank refuses new settings, by its number as text.
        stubborn_ranks: ranks that arm new settings and never take them into force.
        skewed_ranks: ranks that take them into force a pass late.
        dies_armed: whether the launcher dies when a rank arms new settings.
        refuses_to_generate: whether generations are answered by an error.
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
    loads: str | None = "/v1/loads"
    requests: int = 0
    passes_a_second: int = 0
    deaf_ranks: tuple[int, ...] = ()
    refusing_ranks: dict[str, str] = field(default_factory=dict)
    stubborn_ranks: tuple[int, ...] = ()
    skewed_ranks: tuple[int, ...] = ()
    dies_armed: bool = False
    refuses_to_generate: bool = False


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        runner: bytes | None = None,
        version: str = "0.5.9",
        options: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        base: Path | None = None,
    ) -> Self:
        """Make an environment with sglang in it and a model beside it; nothing is started.

        Args:
            root: an empty or missing folder.
            topk: the bytes of topk.py.
            runner: those of model_runner.py; None for a release without one.
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
        install_package(site, topk=topk, runner=runner, version=version)
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
    def runner(self) -> Path:
        """The other file that surgeon cuts, where there is one."""
        return self.package / "srt" / "model_executor" / "model_runner.py"

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
        partial = self.root / "behaviour.partial"
        partial.write_text(json.dumps(asdict(self.behaviour)), encoding="utf-8")
        partial.rename(self.root / "behaviour.json")

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

    def pid_of(self, title: str) -> int:
        """Return its process of that title."""
        (found,) = (p for p in self.pids() if Path(f"/proc/{p}/cmdline").read_bytes().startswith(f"{title}\0".encode()))
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
