"""Installed by tests.support.servers as ``sglang/launch_server.py``: serves HTTP like sglang's launcher, with no model.

It is started as ``python -m sglang.launch_server --model-path M --port N [--tp T]`` and starts one process per rank
that is titled like sglang's scheduler, and one like its detokenizer. What goes wrong is read from the JSON file that
FAKE_SGLANG names, once at start; ``tests.support.servers.Behaviour`` lists it. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
MOE = HERE.parent / "srt" / "layers" / "moe"
BEHAVIOUR: dict[str, Any] = json.loads(Path(os.environ["FAKE_SGLANG"]).read_text(encoding="utf-8"))
PR_SET_PDEATHSIG = 1


def value_of(name: str, default: str) -> str:
    """Return an option of the command line, in ``--name value`` or ``--name=value``."""
    found = default
    for place, word in enumerate(sys.argv):
        if word == name:
            found = sys.argv[place + 1]
        elif word.startswith(name + "="):
            found = word.partition("=")[2]
    return found


def say(text: str) -> None:
    """Log a line, as sglang does, to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def now() -> dict[str, Any]:
    """Return the behaviour as it is now: what goes wrong between two requests is switched while the server runs."""
    return dict(json.loads(Path(os.environ["FAKE_SGLANG"]).read_text(encoding="utf-8")))


# ---------------------------------------------------------------- a rank


def patched_settings() -> dict[str, Any] | None:
    """Return the settings beside topk.py; None when topk.py does not call a runtime that is there."""
    runtime, settings = MOE / "_surgeon_oea.py", MOE / "_surgeon_oea.json"
    if b"_surgeon_oea" not in (MOE / "topk.py").read_bytes() or not runtime.exists() or not settings.exists():
        return None
    return dict(json.loads(settings.read_text(encoding="utf-8")))


if patched_settings() is not None:
    BEHAVIOUR.update(BEHAVIOUR["patched"])


class Rank:
    """What the runtime inside a real rank does: it counts passes, and takes new settings over at one of them."""

    def __init__(self, rank: int, ranks: int, counter: Path) -> None:
        """Import what lies beside topk.py, as a process does once."""
        self.rank, self.ranks, self.counter = rank, ranks, counter
        found = patched_settings()
        self.patched = found is not None
        self.settings: dict[str, Any] = found or {}
        self.runtime = (MOE / "_surgeon_oea.py").read_text(encoding="utf-8") if self.patched else ""
        runner = MOE.parent.parent / "model_executor" / "model_runner.py"
        self.announced = runner.exists() and b"_surgeon_oea" in runner.read_bytes()
        self.passes = 0
        self.from_pass = 0
        self.armed: dict[str, Any] | None = None
        self.arming: dict[str, Any] = {}
        self.refused: dict[str, Any] | None = None
        self.seen = b""
        self.applied = False
        self.told: object = None

    def turn(self) -> None:
        """Do what a few passes, or none, and a look at the settings file come to; say what is new."""
        if not self.patched:
            return
        faults = now()
        self._read(faults)
        try:
            self.passes = int(self.counter.read_text(encoding="ascii")) if self.announced else 0
        except (OSError, ValueError):
            return
        held = self.rank in faults["stubborn_ranks"]
        if self.armed and self.passes >= self.armed["at_pass"] and not held:
            late = 1 if self.rank in faults["skewed_ranks"] else 0
            self.settings, self.from_pass, self.armed = self.arming, self.armed["at_pass"] + late, None
        news = (self.passes, self.from_pass, self.armed, self.refused, self.settings.get("generation"), self.applied)
        if self.applied and news != self.told:
            self.told = news
            self.write_beacon()

    def _read(self, faults: dict[str, Any]) -> None:
        if not self.announced or self.rank in faults["deaf_ranks"]:
            return
        try:
            content = (MOE / "_surgeon_oea.json").read_bytes()
        except OSError:
            return
        if content == self.seen:
            return
        self.seen, file = content, json.loads(content)
        generation, in_force = file["generation"], self.settings["generation"]
        if generation == in_force:
            self.armed = None
        if generation <= in_force or file.get("at_pass") is None:
            return
        why = faults["refusing_ranks"].get(str(self.rank))
        if self.passes >= file["at_pass"]:
            why = f"read at pass {self.passes}, which is not before {file['at_pass']}"
        if why:
            self.refused = {"generation": generation, "why": why}
            return
        if faults["dies_armed"]:
            os.kill(os.getppid(), signal.SIGKILL)
        self.arming = file
        self.armed = {"generation": generation, "at_pass": file["at_pass"], "pass": self.passes}

    def write_beacon(self) -> None:
        """Write what the runtime inside a real rank would write."""
        if self.rank in BEHAVIOUR["beacon_silent_ranks"]:
            return
        stamped = re.search(r'^PATCH_HASH\b.*= "([^"]*)"', self.runtime, re.MULTILINE)
        versioned = re.search(r'^PATCH_VERSION\b.*= "([^"]*)"', self.runtime, re.MULTILINE)
        words = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        override = os.environ.get("SGLANG_OEA_K0")
        beacon = {
            "schema": "surgeon/beacon/1",
            "pid": os.getpid(),
            "start_ticks": int(words[19]),
            "started": time.time(),
            "rank": self.rank,
            "world_size": self.ranks,
            "patch": "oea",
            "patch_version": versioned.group(1) if versioned else None,
            "patch_hash": BEHAVIOUR["beacon_hash"] or (stamped.group(1) if stamped else None),
            "sglang_version": "0.5.9",
            "state": "on",
            "layers": 4,
            "gate": "forward-mode" if self.announced else "row-count",
            "pass": self.passes,
            "armed": self.armed,
            "refused": self.refused,
            "in_force": {"generation": self.settings["generation"], "from_pass": self.from_pass},
            "applied": self.applied and BEHAVIOUR["beacon_applied"],
            "rows": 8 if self.applied else 0,
            "capture": "eager",
            "skipped": None,
            "settings": {**self.settings, **({"k0": int(override)} if override else {})},
            "settings_source": "environment" if override else "file",
            "settings_problem": BEHAVIOUR["beacon_settings_problem"],
            "generation": self.settings["generation"],
            "written": time.time(),
        }
        folder = Path(self.settings["beacon_dir"])
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = folder / f".{os.getpid()}.partial"
        partial.write_text(json.dumps(beacon), encoding="utf-8")
        partial.rename(folder / f"{os.getpid()}.json")


def be_a_child(rank: int, ranks: int, parent: int) -> None:
    """Be a scheduler or the detokenizer until the launcher is gone, unless this one is to outlive it."""
    if parent:
        # sglang's children ask the kernel for this too.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    if BEHAVIOUR["ignore_term"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank >= 0:
        say(f"rank {rank} is up")
    one = Rank(rank, ranks, counter_of(os.getppid()))
    while True:
        # The launcher tells of passes by this signal, blocked since before this process was born.
        told = signal.sigtimedwait({signal.SIGUSR1}, 0.05)
        if rank >= 0 and BEHAVIOUR["beacons"]:
            one.applied = one.applied or told is not None
            one.turn()


def counter_of(launcher: int) -> Path:
    """Return the file in which a launcher counts its passes."""
    return Path(os.environ["FAKE_SGLANG"]).with_name(f"passes-{launcher}")


def child(title: str, rank: int, ranks: int, *, orphan: bool = False) -> int:
    """Start a child whose command line begins with its title, as setproctitle would leave it."""
    words = [title, "-B", str(HERE), "--child", str(rank), str(ranks), "0" if orphan else str(os.getpid())]
    variables = {**os.environ, "PYTHONHOME": sys.base_prefix}
    if not orphan:
        return subprocess.Popen(words, executable=sys.executable, env=variables).pid
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            os.execve(sys.executable, words, variables)  # noqa: S606 - no shell is wanted
        os._exit(0)
    os.waitpid(between, 0)
    return 0


# ---------------------------------------------------------------- the launcher


class Server(ThreadingHTTPServer):
    """The HTTP side."""

    daemon_threads = True
    ready = False
    served = 0
    passes = 0
    workers: tuple[int, ...] = ()
    counting = threading.Lock()

    def count(self, passes: int) -> None:
        """Make some forward passes in every rank."""
        with self.counting:
            self.passes += passes
            counter = counter_of(os.getpid())
            counter.with_suffix(".partial").write_text(str(self.passes), encoding="ascii")
            counter.with_suffix(".partial").rename(counter)

    def be_busy(self) -> None:
        """Make the passes of requests that never end, while there are to be some."""
        while True:
            time.sleep(0.1)
            more = now()["passes_a_second"] // 10
            if more:
                self.count(more)


class Handler(BaseHTTPRequestHandler):
    """The few endpoints that surgeon uses."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Log nothing per request."""

    def answer(self, status: int, value: Any) -> None:
        """Send JSON."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self) -> bool:
        """Check the API key, if there is one."""
        key = value_of("--api-key", "")
        if not key or self.headers.get("Authorization") == "Bearer " + key:
            return True
        self.answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        """Answer /health and the server's arguments."""
        if self.path == "/health":
            self.answer(BEHAVIOUR["health"] or (200 if self.server.ready else 503), {})
        elif self.path == "/server_info" and self.allowed():
            model, key = value_of("--model-path", ""), value_of("--api-key", "")
            info = {"version": "0.5.9", "model_path": model, "tp_size": int(value_of("--tp", "1")), "api_key": key}
            info["expert_distribution_recorder_mode"] = value_of("--expert-distribution-recorder-mode", "") or None
            self.answer(200, {**info, "moe_runner_backend": "auto", "internal_states": [{"big": 1}]})
        elif self.path == now()["loads"] and self.allowed():
            told = {"num_running_reqs": now()["requests"], "num_waiting_reqs": 0, "num_reqs": now()["requests"]}
            self.answer(200, [told] if self.path == "/get_load" else {"loads": [told]})
        elif self.path not in ("/server_info", now()["loads"]):
            self.answer(404, {})

    def record(self, what: str) -> None:
        """Do what the recorder is told; where it is off, end as the real server does, by its scheduler's exception."""
        if not value_of("--expert-distribution-recorder-mode", ""):
            say("Scheduler hit an exception: RuntimeError: recorder is not enabled")
            os._exit(1)
        say(f"recorder: {what}")
        folder = Path(os.environ["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"])
        for rank, name in enumerate(BEHAVIOUR["recordings"] if what == "dump" else ()):
            shutil.copyfile(name, folder / f"expert_distribution_recorder_{time.time()}_{rank}.pt")
        self.answer(200, "Success")

    def do_POST(self) -> None:
        """Answer /generate, and the endpoints of the recorder."""
        recorder = re.fullmatch("/(start|stop|dump)_expert_distribution_record", self.path)
        if recorder:
            self.record(recorder.group(1))
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            self.answer(404, {})
            return
        if not self.allowed():
            return
        if BEHAVIOUR["needs_ids"] and "input_ids" not in asked:
            self.answer(400, {"error": {"message": "input_ids are needed"}})
            return
        self.server.served += 1
        hangs_after = BEHAVIOUR["hang_after"]
        if hangs_after is not None and self.server.served > hangs_after:
            threading.Event().wait()
        if BEHAVIOUR["die_on_generate"]:
            say("Scheduler hit an exception: " + BEHAVIOUR["die_log"])
            os._exit(1)
        if now()["refuses_to_generate"]:
            self.answer(500, {"error": {"message": "out of memory"}})
            return
        self.server.count(int(asked["sampling_params"]["max_new_tokens"]))
        for pid in self.server.workers:
            os.kill(pid, signal.SIGUSR1)
        count = int(asked["sampling_params"]["max_new_tokens"]) + BEHAVIOUR["extra_tokens"]
        latency = float("nan") if BEHAVIOUR["nan"] else 0.01
        meta = {
            "id": secrets.token_hex(8),
            "completion_tokens": count,
            "e2e_latency": latency,
            "finish_reason": {"type": "length"},
        }
        self.answer(200, {"text": " x" * count, "output_ids": [7] * count, "meta_info": meta})


def starting(seconds: float) -> None:
    """Take a while to start, with or without a word in the log."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if BEHAVIOUR["log_while_starting"]:
            say(f"Loading weights: {until - time.monotonic():.1f} s to go")
        time.sleep(0.1)


def linger(*_: object) -> None:
    """End the main thread alone: the process is a zombie to look at, and its last thread still holds the port."""

    def leave() -> None:
        time.sleep(BEHAVIOUR["linger_s"])
        os._exit(0)

    threading.Thread(target=leave).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)


def main() -> None:
    """Be the launcher."""
    port, ranks = int(value_of("--port", "30000")), int(value_of("--tp", "1"))
    say(f"server_args=ServerArgs(port={port}, api_key={value_of('--api-key', '')!r})")
    say(f"environment: {json.dumps({n: v for n, v in os.environ.items() if n.startswith('LAUNCH_')}, sort_keys=True)}")
    # The real server imports topk.py; one that does not compile ends it.
    compile((MOE / "topk.py").read_bytes(), str(MOE / "topk.py"), "exec")
    if BEHAVIOUR["ignore_term"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if BEHAVIOUR["linger_s"]:
        signal.signal(signal.SIGTERM, linger)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    workers = []
    for rank in range(ranks - BEHAVIOUR["missing_workers"]):
        title = "sglang::scheduler" + (f"_TP{rank}" if ranks > 1 else "")
        workers.append(child(title, rank, ranks))
    child("sglang::detokenizer", -1, ranks)
    if BEHAVIOUR["orphan"]:
        child("sglang::scheduler_DP1", -1, ranks, orphan=True)
    starting(BEHAVIOUR["start_s"])
    if BEHAVIOUR["dies"]:
        say(BEHAVIOUR["die_log"])
        sys.exit(1)
    if BEHAVIOUR["never_listens"]:
        while True:
            starting(1.0)
    server = Server(("127.0.0.1", port), Handler)
    server.workers = tuple(workers)
    server.count(0)
    threading.Thread(target=server.be_busy, daemon=True).start()
    timer = threading.Timer(BEHAVIOUR["warm_up_s"], setattr, [server, "ready", True])
    timer.daemon = True
    timer.start()
    say("The server is fired up and ready to roll!")
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        be_a_child(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
