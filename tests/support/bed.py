"""A node on the test bench: a real SSH server, an sglang that serves, and surgeon's command line aimed at both."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon import patches, surgery
from surgeon.operations import grafts
from tests.support.command import Answer
from tests.support.servers import FakeServer
from tests.support.ssh import openssh_node
from tests.support.wheels import member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.ssh import SshNode

FAULTY_PYTHON = Path(__file__).with_name("faulty_python.py")
RELEASE = "0.5.9"


RUNNER = f"sglang/{surgery.FORWARD.file}"


def topk() -> bytes:
    """The topk.py of a release's wheel."""
    return member(RELEASE)


def runner() -> bytes:
    """The model_runner.py of the same wheel."""
    return member(RELEASE, RUNNER)


def grafted(source: bytes, place: surgery.Place = surgery.EXPERTS) -> bytes:
    """What a file is once the patch is in."""
    return surgery.graft(source, grafts.graft_spec(patches.load("oea"), place)).result


@dataclass
class Running:
    """A surgeon at work."""

    child: subprocess.Popen[bytes]
    out: Path
    err: Path
    timeout_s: float = 120.0

    def said(self, text: str) -> None:
        """Wait until it has said this on standard error, or has ended."""
        await_(lambda: text in self.err.read_text("utf-8") or self.child.poll() is not None)

    @property
    def answer(self) -> Answer:
        """What it came to."""
        return Answer(self.child.returncode, self.out.read_text("utf-8"), self.err.read_text("utf-8"))


def await_(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    until = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.02)


@dataclass
class Bed:
    """The node, and the machine of the person who works on it.

    Attributes:
        root: holds everything.
        fake: the installed sglang and its server.
        ssh: the SSH server and the client's keys.
        settings: what surgeon.toml says.
        original: topk.py's bytes as they were installed.
        original_runner: those of model_runner.py; empty for a release without one.
        begun: how many commands were begun.
    """

    root: Path
    fake: FakeServer
    ssh: SshNode
    settings: dict[str, Any] = field(default_factory=dict)
    original: bytes = b""
    original_runner: bytes = b""
    begun: int = 0

    def __post_init__(self) -> None:
        """Aim surgeon.toml at the node."""
        self.original = self.fake.topk.read_bytes()
        self.original_runner = self._runner()
        self.settings = {
            "host": "node",
            "ssh_config": str(self.ssh.config),
            "state_dir": str(self.ssh.state_dir),
            "python": str(self.fake.python),
            "port": self.fake.port,
            "connect_timeout_s": 10,
        }
        self.configure()

    def configure(self, **settings: Any) -> None:
        """Change surgeon.toml; None takes a key away."""
        self.settings = {k: v for k, v in {**self.settings, **settings}.items() if v is not None}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.settings.items())
        (self.root / "surgeon.toml").write_text(text, encoding="utf-8")

    # ------------------------------------------------------------ commands

    def surgeon(self, *words: str, interrupt_when: Sequence[str] = (), timeout_s: float = 120.0) -> Answer:
        """Run ``surgeon WORDS`` as a person would, without a terminal.

        Args:
            words: the command line.
            interrupt_when: press Ctrl-C each time that the next of these has been said on standard error.
            timeout_s: seconds until the test gives up.
        """
        with self.beginning(*words) as running:
            for said in interrupt_when:
                running.said(said)
                running.child.send_signal(signal.SIGINT)
            running.timeout_s = timeout_s
        return running.answer

    @contextlib.contextmanager
    def beginning(self, *words: str) -> Iterator[Running]:
        """Begin ``surgeon WORDS`` and have it end before the block is left."""
        # One may look on while another is at work.
        self.begun += 1
        out, err = self.root / f"stdout-{self.begun}", self.root / f"stderr-{self.begun}"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", "surgeon", *words],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "SURGEON_CONFIG": str(self.root / "surgeon.toml"), "COLUMNS": "200"},
                start_new_session=True,
            )
        (self.root / "client.pid").write_text(str(child.pid), encoding="ascii")
        running = Running(child, out, err)
        try:
            yield running
            child.wait(running.timeout_s)
        finally:
            child.kill()
            child.wait()

    def apply(self, *words: str, **options: Any) -> Answer:
        """Apply, without a benchmark, and give the server ten seconds to get ready."""
        return self.surgeon("apply", "oea", "--yes", "--no-bench", "--ready-timeout", "10", *words, **options)

    def rollback(self, *words: str, **options: Any) -> Answer:
        """Roll back, and give the server ten seconds to get ready."""
        return self.surgeon("rollback", "--yes", "--ready-timeout", "10", *words, **options)

    def restart(self, *words: str, **options: Any) -> Answer:
        """Restart, and give the server ten seconds to get ready."""
        return self.surgeon("restart", "--yes", "--ready-timeout", "10", *words, **options)

    def status(self) -> dict[str, Any]:
        """What ``surgeon status --json`` tells."""
        answer = self.surgeon("status", "--json")
        assert answer.code == 0, answer
        return answer.result

    def revisions(self) -> list[tuple[str, str]]:
        """Kind and status of every revision, read from the ledger's own lines."""
        (ledger,) = self.ssh.state_dir.rglob("ledger.jsonl")
        records = [json.loads(line) for line in ledger.read_text(encoding="ascii").splitlines()]
        last = {record["revision"]: (record["kind"], record["status"]) for record in records}
        return [last[number] for number in sorted(last)]

    # ------------------------------------------------------------ faults

    def break_at(self, verb: str, at: str = "start", *, do: Sequence[str], wait_s: float = 0.5) -> None:
        """Have something break once, at a precise moment of the agent's work on the node.

        Args:
            verb: what the agent is doing then.
            at: ``start``; ``compile`` (of the staged files), ``first-rename`` or ``second-rename`` (of one into its
                place), ``unlink`` (of a file that surgeon had added); ``term`` (before the server is told to end),
                ``spawn`` (it has ended and is not yet started).
            do: in turn: ``cut`` kills the SSH session, ``kill-client`` and ``interrupt-client`` signal surgeon,
                ``wait`` lets the others act, ``die`` kills the agent; without that it goes on.
            wait_s: how long ``wait`` is.
        """
        script, plan = self.root / "python", self.root / "fault.json"
        words = {"verb": verb, "at": at, "do": list(do), "wait_s": wait_s, "ssh_server": self.ssh.pid}
        plan.with_suffix(".fired").unlink(missing_ok=True)
        plan.write_text(json.dumps({**words, "client": str(self.root / "client.pid")}), encoding="utf-8")
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAULTY_PYTHON}" "{plan}" "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        self.configure(node_python=str(script))

    @property
    def broke(self) -> bool:
        """Whether the moment of the last ``break_at`` has come."""
        return (self.root / "fault.fired").exists()

    def await_break(self) -> None:
        """Wait until the moment of the last ``break_at`` has come."""
        await_(lambda: self.broke)

    def await_agents(self) -> None:
        """Wait until no agent works on the node any more; one goes on when its connection is cut."""
        state = os.fsencode(self.ssh.state_dir)

        def idle() -> bool:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    words = path.read_bytes().split(b"\0")
                    if state in words and b"-c" in words:
                        return False
            return True

        await_(idle)

    # ------------------------------------------------------------ what is true on the node

    @property
    def moe(self) -> Path:
        """The folder of topk.py."""
        return self.fake.topk.parent

    def files(self) -> dict[str, tuple[Any, ...]]:
        """Every file of the package: hash, mode, owner, links and time of writing."""
        found: dict[str, tuple[Any, ...]] = {}
        for path in sorted(self.fake.package.rglob("*")):
            if path.is_file():
                now = path.stat()
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path)] = (digest, now.st_mode, now.st_uid, now.st_gid, now.st_nlink, now.st_mtime_ns)
        return found

    def facts(self) -> dict[str, Any]:
        """Everything that a refused command must leave as it was: files, server, ledger."""
        ledgers = {str(p): p.read_bytes() for p in self.ssh.state_dir.rglob("ledger.jsonl")}
        return {"files": self.files(), "pids": sorted(self.fake.pids()), "ledgers": ledgers}

    def names(self) -> set[str]:
        """The names beside topk.py."""
        return {path.name for path in self.moe.iterdir()} - {"__pycache__"}

    def _runner(self) -> bytes:
        return self.fake.runner.read_bytes() if self.fake.runner.exists() else b""

    def is_original(self) -> bool:
        """Whether the package is byte for byte as installed, with nothing beside."""
        both = (self.fake.topk.read_bytes(), self._runner())
        return both == (self.original, self.original_runner) and self.names() == {"__init__.py", "topk.py"}

    def is_patched(self) -> bool:
        """Whether the patch is in, whole: both grafts, every module and the settings, and nothing else."""
        oea = patches.load("oea")
        shipped = {f"{module.name}.py": module.content for module in oea.shipped}
        runner = grafted(self.original_runner, surgery.FORWARD) if self.original_runner else b""
        return (
            self.names() == {"__init__.py", "topk.py", f"{oea.module}.json", *shipped}
            and (self.fake.topk.read_bytes(), self._runner()) == (grafted(self.original), runner)
            and all((self.moe / name).read_bytes() == content for name, content in shipped.items())
            and json.loads((self.moe / f"{oea.module}.json").read_text("utf-8"))["schema"].startswith("surgeon/")
        )

    def serves(self) -> bool:
        """Whether the server answers a generation."""
        body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}}).encode()
        url = f"http://127.0.0.1:{self.fake.port}/generate"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), opener.open(request, timeout=10) as answer:
            return bool(answer.status == 200)
        return False

    def launchers(self) -> int:
        """How many launchers of this server run: a restart that went wrong twice leaves two."""
        return sum(
            1
            for pid in self.fake.pids()
            if b"sglang.launch_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )


@contextlib.contextmanager
def make_bed(
    root: Path, *, source: bytes | None = None, other: bytes | None = None, options: tuple[str, ...] = ()
) -> Iterator[Bed]:
    """Make a node with sglang installed; nothing serves yet.

    Args:
        root: an empty folder.
        source: topk.py; None for the release's own.
        other: model_runner.py; None for the release's own, empty for none.
        options: further words of the server's launch.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / "ssh").mkdir()
    code = topk() if source is None else source
    executor = runner() if other is None else other or None
    with (
        openssh_node(root / "ssh") as ssh,
        FakeServer.install(root / "fake", topk=code, runner=executor, version=RELEASE, options=options) as fake,
    ):
        yield Bed(root, fake, ssh)
