"""Brings the lab up, says what is there, and takes it down."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.errors import SurgeonError
from surgeon.lab import build, loopback, preflight, recipes, server, sshd
from surgeon.lab.paths import locked, paths
from surgeon.lab.progress import Silent
from surgeon.node.target import Target

if TYPE_CHECKING:
    from surgeon.lab.progress import Progress

TOP_K = 8
EXPERTS = 64
_START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Wanted:
    """Which lab is wanted.

    Attributes:
        sglang: the release.
        ranks: tensor-parallel size.
        bias: standard deviation of the routing rule's correction bias; 0 lets formulas apply.
        seed: of the model's weights.
        options: further words of the server's launch.
    """

    sglang: str = recipes.DEFAULT
    ranks: int = 1
    bias: float = 0.0
    seed: int = 2
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """What runs, as lab.json keeps it.

    Attributes:
        wanted: what was asked for.
        host: for ``--host`` and ssh.
        ssh_config: the client configuration that knows the host.
        ssh_kind: ``openssh`` or ``asyncssh``.
        ssh_port: on 127.0.0.1.
        python: the interpreter that has sglang.
        state_dir: surgeon's state on the node.
        port: the server's, on 127.0.0.1.
        pid: the launcher's when the lab came up; a restart changes it.
        log: the server's.
        model: the model's folder.
        recordings: where the server's recorder writes; empty for releases whose recorder needs a GPU.
        top_k: experts per token.
        experts: routed experts per layer.
    """

    wanted: Wanted
    host: str
    ssh_config: str
    ssh_kind: str
    ssh_port: int
    python: str
    state_dir: str
    port: int
    pid: int
    log: str
    model: str
    recordings: str
    top_k: int = TOP_K
    experts: int = EXPERTS

    def as_json(self) -> dict[str, object]:
        """A JSON object, with what was asked for among the rest."""
        plain = dataclasses.asdict(self)
        asked = plain.pop("wanted")
        return {"schema": "surgeon/lab/1", **asked, **plain}

    @classmethod
    def parse(cls, text: str) -> Description:
        """Read what `as_json` gave.

        Args:
            text: JSON.

        Raises:
            ValueError: it is something else.
        """
        plain = json.loads(text)
        try:
            words = {field.name: plain[field.name] for field in dataclasses.fields(Wanted)}
            asked = Wanted(**{**words, "options": tuple(words["options"])})
            rest = [field.name for field in dataclasses.fields(cls) if field.name != "wanted"]
            return cls(wanted=asked, **{name: plain[name] for name in rest})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a description of a lab: {error}") from error


@dataclass(frozen=True)
class Status:
    """What is there now.

    Attributes:
        description: of the lab that was brought up last; None after ``down``.
        server_pid: the launcher's; None if no server runs.
        serving: whether it answers /health with 200.
        ssh: the SSH server, or None.
        processes: how many processes the server is made of.
    """

    description: Description | None
    server_pid: int | None
    serving: bool
    ssh: sshd.SshServer | None
    processes: int


@dataclass(frozen=True)
class Up:
    """What ``up`` did.

    Attributes:
        description: of the lab.
        reused: what was there already, in words.
        made: what had to be built or started, in words.
        seconds: it took.
    """

    description: Description
    reused: tuple[str, ...]
    made: tuple[str, ...]
    seconds: float


def up(
    wanted: Wanted | None = None,
    *,
    python: Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Up:
    """Bring the lab up: build what is missing, start what does not run, replace a lab that is another one.

    Args:
        wanted: which lab; None for the default one.
        python: the interpreter to build environments from; None to look for one.
        fresh: restore sglang from its wheel, forget the node's state, and restart the server.
        progress: who follows the work.

    Raises:
        SurgeonError: the machine cannot run it, or a step failed.
    """
    wanted = wanted or Wanted()
    observer = progress or Silent()
    began = time.monotonic()
    preflight.require_linux()
    release = recipes.recipe(wanted.sglang)
    preflight.cores_per_rank(wanted.ranks)
    sshd.choose_kind()
    with locked("lab", waiting=lambda: observer.note("Waiting for another surgeon to be done with the lab")):
        interpreter = preflight.choose_python(release, python)
        environment = build.environment(release, interpreter, progress=observer)
        model = build.model(environment, seed=wanted.seed, bias=wanted.bias, progress=observer)
        before = status()
        same = before.description is not None and before.description.wanted == wanted and before.serving
        keep = same and not fresh and before.description is not None and before.description.model == str(model.folder)
        if not keep:
            _clear(before, observer)
            paths().faults.unlink(missing_ok=True)
        if fresh:
            shutil.rmtree(paths().node / "state", ignore_errors=True)
            if environment.reused:
                build.restore(environment, progress=observer)
        paths().state.mkdir(parents=True, exist_ok=True, mode=0o700)
        ssh = sshd.start(paths().node / "ssh")
        if keep and before.description is not None:
            port, pid = before.description.port, before.server_pid or before.description.pid
            log = Path(before.description.log)
        else:
            planned = server.plan(
                environment, model.folder, port=sshd.free_port(), ranks=wanted.ranks, options=wanted.options
            )
            with observer.step(f"Starting sglang {wanted.sglang} ({wanted.ranks} rank(s), about a minute)"):
                pid = server.launch(planned, ranks=wanted.ranks, timeout_s=_START_TIMEOUT_S).pid
            port, log = planned.port, planned.log
        description = Description(
            wanted=wanted,
            host=sshd.HOST,
            ssh_config=str(ssh.client_config),
            ssh_kind=ssh.kind,
            ssh_port=ssh.port,
            python=str(environment.python),
            state_dir=str(paths().state),
            port=port,
            pid=pid,
            log=str(log),
            model=str(model.folder),
            recordings=str(paths().recordings) if release.recorder else "",
        )
        _write(description)
    parts = {
        f"environment of sglang {wanted.sglang}": environment.reused,
        f"model {model.folder.name}": model.reused,
        f"SSH server ({ssh.kind}, port {ssh.port})": ssh.reused,
        f"server (pid {pid}, port {port})": keep,
    }
    return Up(
        description,
        reused=tuple(name for name, reused in parts.items() if reused),
        made=tuple(name for name, reused in parts.items() if not reused),
        seconds=time.monotonic() - began,
    )


def status() -> Status:
    """What is there now, whatever lab.json says."""
    description = read()
    running = server.find()
    return Status(
        description=description,
        server_pid=running.pid if running else None,
        serving=bool(running and description and loopback.status(description.port, "/health") == 200),  # noqa: PLR2004 - HTTP's OK
        ssh=sshd.find(paths().node / "ssh"),
        processes=len(server.mine()),
    )


def down() -> int:
    """Take the lab down; environments, models and the node's state stay for the next time.

    Returns:
        How many server processes were ended.

    Raises:
        SurgeonError: something would not end.
    """
    with locked("lab"):
        ended = server.stop()
        sshd.stop(paths().node / "ssh")
        paths().faults.unlink(missing_ok=True)
        paths().description.unlink(missing_ok=True)
        return ended


def read() -> Description | None:
    """What lab.json says, or None if there is no lab or it was written by another version of surgeon."""
    try:
        return Description.parse(paths().description.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def target() -> Target:
    """The lab as a node to work on, which is what ``--host lab`` means.

    Raises:
        SurgeonError: no lab is up.
    """
    description = read()
    if description is None:
        raise SurgeonError("No lab is up.", advice="Bring one up: surgeon lab up", code="lab-down")
    return Target(
        host=description.host,
        ssh_config=Path(description.ssh_config),
        python=description.python,
        state_dir=description.state_dir,
        port=description.port,
    )


def _clear(before: Status, observer: Progress) -> None:
    if not before.processes:
        return
    old = before.description.wanted if before.description else None
    what = f"sglang {old.sglang}, {old.ranks} rank(s), bias {old.bias:g}" if old else "an unknown lab"
    with observer.step(f"Stopping the server that runs ({what})"):
        server.stop()


def _write(description: Description) -> None:
    temporary = paths().description.with_suffix(".tmp")
    temporary.write_text(json.dumps(description.as_json(), indent=1) + "\n", encoding="utf-8")
    temporary.replace(paths().description)
