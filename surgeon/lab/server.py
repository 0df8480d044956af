"""The lab's sglang server: launched as a user would launch it, waited for, found again, stopped."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.errors import SurgeonError
from surgeon.lab import loopback, preflight, processes
from surgeon.lab.paths import paths

if TYPE_CHECKING:
    from pathlib import Path

    from surgeon.lab.build import Environment
    from surgeon.lab.processes import Process

FAULTS_VARIABLE = "SURGEON_LAB_FAULTS"
_MODULE = "sglang.launch_server"
_POLL_S = 0.5
_LOG_LINES = 15
# Variables of the shell that would change which Python, or which node, the server sees; and the one that keeps Python
# from caching bytecode, without which each of the server's processes compiles thousands of modules at every start.
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONNOUSERSITE", "SGLANG_OEA_K0", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True)
class Launch:
    """How the server is launched.

    Attributes:
        argv: as a user would type it.
        log: where standard output and error go.
        port: on 127.0.0.1.
    """

    argv: tuple[str, ...]
    log: Path
    port: int


def plan(environment: Environment, model: Path, *, port: int, ranks: int, options: tuple[str, ...] = ()) -> Launch:
    """How to launch the server.

    Args:
        environment: with sglang in it.
        model: the model's folder.
        port: to listen on.
        ranks: tensor-parallel size.
        options: further words of the command line.
    """
    argv = [
        *(str(environment.python), "-m", _MODULE, "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--grammar-backend", "none"),
        *("--max-total-tokens", "20000", "--mem-fraction-static", "0.3"),
        "--sleep-on-idle",  # an idle scheduler would otherwise keep a core of a small machine busy
    ]
    if ranks > 1:
        argv += ["--tp", str(ranks)]
    if environment.recipe.recorder:
        argv += ["--expert-distribution-recorder-mode", "per_pass"]
    argv += options
    return Launch(tuple(argv), paths().logs / f"sglang-{port}.log", port)


def launch(planned: Launch, *, ranks: int, timeout_s: float) -> Process:
    """Launch the server and wait until it serves.

    Args:
        planned: from `plan`.
        ranks: tensor-parallel size.
        timeout_s: seconds it may take.

    Returns:
        The launcher's process, in a session of its own.

    Raises:
        SurgeonError: it ended, or did not serve in time; its last words are in the message.
    """
    for folder in (paths().recordings, planned.log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    planned.log.unlink(missing_ok=True)
    pid = processes.detach(planned.argv, log=planned.log, cwd=paths().node, env=_variables(ranks))
    try:
        return _wait_until_serving(planned, pid, timeout_s)
    except BaseException:
        processes.end(mine(), grace_s=5.0)
        raise


def _wait_until_serving(planned: Launch, pid: int, timeout_s: float) -> Process:
    deadline = time.monotonic() + timeout_s
    while (process := processes.look_up(pid)) is not None:
        if loopback.status(planned.port, "/health") == 200:  # noqa: PLR2004 - HTTP's OK
            return process
        if time.monotonic() > deadline:
            raise _failed(planned, f"did not serve within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    raise _failed(planned, "ended before it served")


def mine() -> list[Process]:
    """Every process of the lab's servers, whoever started them and whatever they call themselves."""
    return processes.marked(FAULTS_VARIABLE, str(paths().faults), mapping=paths().lab / "env-")


def find() -> Process | None:
    """The launcher of the lab's server, also after surgeon has restarted it; None if none runs."""
    launchers = [process for process in mine() if _MODULE in process.argv]
    pids = {process.pid for process in launchers}
    return next((process for process in launchers if process.parent not in pids), None)


def stop() -> int:
    """Stop the lab's servers, with all they started.

    Returns:
        How many processes were ended.

    Raises:
        SurgeonError: some would not end.
    """
    ended: dict[tuple[int, int], Process] = {}
    # A process that was just being born when we looked is seen the next time.
    while running := [process for process in mine() if processes.alive(process)]:
        processes.end(running)
        ended |= {(process.pid, process.started): process for process in running}
    return len(ended)


def last_lines(log: Path, count: int) -> list[str]:
    """The end of a log.

    Args:
        log: the file; need not exist.
        count: of lines.
    """
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def _variables(ranks: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    return inherited | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(preflight.cores_per_rank(ranks)),
        # The model is tiny: a second thread gains nothing, and threads that wait for each other on a busy machine
        # make a pass up to thirty times slower.
        "OMP_NUM_THREADS": "1",
        "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(paths().recordings),
        # Compiling a handful of small functions costs every start 20 s and a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        FAULTS_VARIABLE: str(paths().faults),
    }


def _failed(planned: Launch, how: str) -> SurgeonError:
    tail = "\n".join(last_lines(planned.log, _LOG_LINES))
    return SurgeonError(
        f"The lab's server {how}. The end of its log:\n{tail}",
        advice=f"The whole log is {planned.log}. `surgeon lab up --fresh` restores sglang from its wheel.",
        where=str(planned.log),
        code="lab-server",
    )
