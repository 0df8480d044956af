"""The small verbs: watch, http, run and tail, against a real process."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.errors import SurgeonError, UsageError
from tests.support.local_node import server_at
from tests.support.servers import FakeServer, free_port

if TYPE_CHECKING:
    from pathlib import Path

    from surgeon.node.client import Node


def watch(node: Node, fake: FakeServer, **more: Any) -> dict[str, Any]:
    """Look at a server once."""
    asked = {"pid": fake.pid, "port": fake.port, "log": str(fake.log), "offset": 0, "health": True, **more}
    return node.call("watch", asked)


def test_a_look_tells_processes_port_health_and_what_is_new_in_the_log(fake: FakeServer, node: Node) -> None:
    """The second look brings only what was added since the first."""
    fake.start()
    first = watch(node, fake)
    assert (first["alive"], first["listening"], first["listener_is_ours"]) == (True, True, True)
    assert first["health"] == 200
    assert [one["title"] for one in first["workers"]] == ["sglang::scheduler"]
    with fake.log.open("a", encoding="utf-8") as log:
        log.write("one more line\n")
    second = watch(node, fake, offset=first["offset"])
    # A rank may still be saying that it is up.
    assert "one more line\n" in second["log"].splitlines(keepends=True)
    assert "fired up" in first["log"]
    assert "fired up" not in second["log"]


def test_a_log_that_was_cut_is_read_from_its_beginning(fake: FakeServer, node: Node) -> None:
    """Rotation must not hide what a start says."""
    fake.log.write_text("fresh\n", encoding="utf-8")
    seen = node.call("watch", {"pid": 1, "port": 1, "log": str(fake.log), "offset": 10_000})
    assert (seen["log"], seen["offset"]) == ("fresh\n", 6)


def test_a_huge_log_is_cut_to_its_end(fake: FakeServer, node: Node) -> None:
    """The wire carries a quarter of a mebibyte at most."""
    fake.log.write_bytes(b"x" * 1_000_000 + b"\nlast line\n")
    seen = node.call("watch", {"pid": 1, "port": 1, "log": str(fake.log), "offset": 0})
    assert seen["log"].endswith("last line\n")
    assert len(seen["log"]) <= 256 * 1024
    assert seen["offset"] == fake.log.stat().st_size


def test_another_process_on_the_port_is_not_taken_for_the_server(fake: FakeServer, node: Node) -> None:
    """A port that answers proves nothing by itself."""
    fake.behave(never_listens=True)
    fake.start(wait=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fake.port))
        taken.listen()
        seen = watch(node, fake)
    assert (seen["alive"], seen["listening"], seen["listener_is_ours"]) == (True, True, False)
    assert seen["health"] is None
    assert f"pid {os.getpid()} " in seen["listener"]


def test_a_pid_with_another_start_time_is_not_the_server(fake: FakeServer, node: Node) -> None:
    """Pids are given again."""
    fake.start()
    ticks = server_at(node, fake.port)["start_ticks"]
    assert watch(node, fake, start_ticks=ticks)["alive"]
    assert not watch(node, fake, start_ticks=ticks + 1)["alive"]


def test_secrets_are_masked_in_what_a_server_logged(fake: FakeServer, node: Node) -> None:
    """It prints its arguments at start; by tail and by watch they come masked."""
    fake.options = ("--api-key", "sk-very-secret")
    fake.start()
    assert "very-secret" in fake.said()
    assert "very-secret" not in watch(node, fake)["log"]
    tail = node.call("tail", {"path": str(fake.log), "lines": 50})
    assert "server_args" in tail["text"]
    assert "very-secret" not in tail["text"]


def test_tail_returns_the_last_lines_or_says_that_there_is_no_log(fake: FakeServer, node: Node) -> None:
    """As many as were asked for."""
    fake.log.write_text("".join(f"line {number}\n" for number in range(100)), encoding="utf-8")
    assert node.call("tail", {"path": str(fake.log), "lines": 2})["text"] == "line 98\nline 99\n"
    with pytest.raises(SurgeonError, match="no such file"):
        node.call("tail", {"path": str(fake.root / "none.log")})


def generate(tokens: int) -> dict[str, Any]:
    """A request for tokens."""
    body = {"text": "x", "sampling_params": {"max_new_tokens": tokens}}
    return {"method": "POST", "path": "/generate", "json": body, "timeout_s": 10}


def test_the_servers_key_is_used_on_the_node_and_never_sent(
    fake: FakeServer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy of our environment is not asked either; answers come in the order of the requests."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fake.options = ("--api-key", "sk-very-secret")
    fake.start()
    requests = [generate(1), {"method": "GET", "path": "/server_info"}, generate(3)]
    answers = node.call("http", {"port": fake.port, "requests": requests, "parallel": 3})["responses"]
    assert [one["status"] for one in answers] == [200, 200, 200]
    counts = [json.loads(answers[place]["body"])["meta_info"]["completion_tokens"] for place in (0, 2)]
    assert counts == [1, 3]
    assert json.loads(answers[1]["body"])["api_key"] == "****"
    assert "very-secret" not in str(answers)


def test_requests_are_in_flight_together_up_to_the_number_asked_for(node: Node) -> None:
    """A decode batch needs company: the barrier opens only when four have arrived."""
    barrier = threading.Barrier(4, timeout=10)

    class Meeting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            barrier.wait()
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """Log nothing."""

    from http.server import ThreadingHTTPServer

    with ThreadingHTTPServer(("127.0.0.1", 0), Meeting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        requests = [{"method": "GET", "path": "/", "timeout_s": 10}] * 8
        answers = node.call("http", {"port": server.server_port, "requests": requests, "parallel": 4})["responses"]
        server.shutdown()
    assert [one["status"] for one in answers] == [204] * 8


def test_an_answer_that_hangs_or_trickles_ends_at_its_timeout(fake: FakeServer, node: Node) -> None:
    """A socket's own timeout would start again with every byte."""

    class Trickle(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            except OSError:
                return

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """Log nothing."""

    fake.behave(hang_after=0)
    fake.start()
    hanging = {**generate(1), "timeout_s": 0.5}
    (hung,) = node.call("http", {"port": fake.port, "requests": [hanging]})["responses"]
    with HTTPServer(("127.0.0.1", 0), Trickle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        request = {"method": "GET", "path": "/", "timeout_s": 0.5}
        (slow,) = node.call("http", {"port": server.server_port, "requests": [request]})["responses"]
        server.shutdown()
    (refused,) = node.call("http", {"port": free_port(), "requests": [generate(1)]})["responses"]
    for answer in (hung, slow):
        assert answer["status"] is None
        assert "no answer within 0.5 s" in answer["error"]
        assert answer["seconds"] < 3
    assert "refused" in refused["error"].lower()


def test_a_request_meant_for_one_server_is_not_sent_to_another(fake: FakeServer, node: Node) -> None:
    """The one that answers must be the one that was started."""
    fake.start()
    (answer,) = node.call("http", {"port": fake.port, "pid": fake.pid, "requests": [generate(1)]})["responses"]
    assert answer["status"] == 200
    with pytest.raises(SurgeonError, match="Expected pid"):
        node.call("http", {"port": fake.port, "pid": os.getpid(), "requests": [generate(1)]})


WHERE = "import json, os, sys; print(json.dumps([os.getcwd(), sys.prefix, os.environ.get('LAUNCH_X'), sys.argv[1:]]))"


def test_code_runs_under_the_servers_interpreter_environment_and_folder(fake: FakeServer, node: Node) -> None:
    """And its arguments reach it as they are."""
    fake.environ = {"LAUNCH_X": "a b"}
    fake.start()
    ran = node.call("run", {"pid": fake.pid, "code": WHERE, "argv": ["x y", "$HOME"]})
    assert ran["returncode"] == 0
    prefix = str(fake.root / "venv")
    assert json.loads(ran["stdout"]) == [str(fake.root), prefix, "a b", ["x y", "$HOME"]]
    as_argv = node.call("run", {"pid": fake.pid, "argv": ["{python}", "-c", WHERE], "env_extra": {"LAUNCH_X": "c"}})
    assert json.loads(as_argv["stdout"]) == [str(fake.root), prefix, "c", []]


def test_a_program_gets_its_input_and_its_status_comes_back(node: Node, tmp_path: Path) -> None:
    """Without a server, an interpreter and a folder are named."""
    code = "import os, sys; print(sys.stdin.read().upper(), os.getcwd()); sys.exit(3)"
    asked = {"python": sys.executable, "code": code, "stdin": "hello", "cwd": str(tmp_path)}
    ran = node.call("run", asked)
    assert (ran["returncode"], ran["timed_out"]) == (3, False)
    assert ran["stdout"].split() == ["HELLO", str(tmp_path)]
    with pytest.raises(UsageError):
        node.call("run", {"code": "1"})
    with pytest.raises(UsageError):
        node.call("run", {})


def test_a_program_that_takes_too_long_is_killed_with_its_children(node: Node, tmp_path: Path) -> None:
    """Nothing of it is left behind."""
    mark = tmp_path / "alive"
    argv = ["/bin/sh", "-c", f"echo begun; (sleep 1.5; touch '{mark}') & sleep 60"]
    ran = node.call("run", {"argv": argv, "timeout_s": 0.5})
    assert ran["timed_out"]
    assert ran["stdout"] == "begun\n"
    assert ran["seconds"] < 5
    time.sleep(1.5)
    assert not mark.exists()


def test_a_flood_of_output_is_cut_to_its_end(node: Node) -> None:
    """What went wrong stands last."""
    code = "print('x' * 3_000_000); print('the end')"
    ran = node.call("run", {"python": sys.executable, "code": code})
    assert ran["stdout"].endswith("the end\n")
    assert ran["stdout"].startswith("[")
    assert len(ran["stdout"]) < 1_100_000


def test_a_secret_of_the_servers_environment_is_masked_in_output(fake: FakeServer, node: Node) -> None:
    """A traceback may print anything."""
    fake.environ = {"HF_TOKEN": "hf_very-secret"}
    fake.start()
    ran = node.call("run", {"pid": fake.pid, "code": "import os; print('got ' + os.environ['HF_TOKEN'])"})
    assert ran["stdout"] == "got ****\n"
