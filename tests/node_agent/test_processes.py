"""Finding servers among real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surgeon.errors import SurgeonError
from surgeon.node.agent import processes, procfs
from surgeon.node.agent.protocol import AgentError
from tests.support.local_node import server_at
from tests.support.servers import FakeServer, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surgeon.node.client import Node


def children_by_ps(pid: int) -> set[int]:
    """Every descendant of a process, as ps and not the agent sees it."""
    table = subprocess.run(["/bin/ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
    found = {pid}
    while more := {child for child, parent in pairs if parent in found} - found:
        found |= more
    return found


def test_a_server_is_found_with_its_tree_port_log_and_interpreter(fake: FakeServer, node: Node) -> None:
    """The launcher is the Python process; its workers are the schedulers; the interpreter is the venv's own."""
    fake.options = ("--tp", "2")
    pid = fake.start()
    server = server_at(node, fake.port)
    assert server["pid"] == pid
    assert set(server["tree"]) == children_by_ps(pid)
    assert [one["title"] for one in server["workers"]] == ["sglang::scheduler_TP0", "sglang::scheduler_TP1"]
    assert server["interpreter"] == str(fake.python)
    assert os.path.realpath(f"/proc/{pid}/exe") != str(fake.python)
    assert server["log"] == str(fake.log)
    assert server["cwd"] == str(fake.root)
    assert server["model_path"] == str(fake.model)
    assert server["listening"]
    assert abs(server["started"] - time.time()) < 60
    assert server["supervised"] is None


@pytest.mark.parametrize(
    "script",
    [
        'bash -c \'"$0" "$@" >> "$LOG" 2>&1; echo over\' "$@" </dev/null >/dev/null 2>&1 & echo $!',
        'nohup nice -n 1 env EXTRA=1 "$@" >> "$LOG" 2>&1 </dev/null & echo $!',
        'bash -c \'nohup "$0" "$@" >> "$LOG" 2>&1; true\' "$@" </dev/null >/dev/null 2>&1 & echo $!',
    ],
)
def test_wrappers_are_not_taken_for_the_server(script: str, fake: FakeServer, node: Node) -> None:
    """Of shell, nohup, nice and env, the process that serves is the one reported, once."""
    fake.start(script=script)
    server = server_at(node, fake.port)
    assert procfs.process(server["pid"]).argv == tuple(fake.argv)  # type: ignore[union-attr]
    assert len(server["workers"]) == 1


def test_an_interpreter_named_without_a_path_is_found_by_the_servers_own_path(fake: FakeServer, node: Node) -> None:
    """`python` means what PATH and the working directory of that server say, not of ours."""
    fake.environ = {"PATH": f"venv/bin:{os.environ['PATH']}"}
    fake.start(script='shift; exec 9>&-; nohup python "$@" >> "$LOG" 2>&1 </dev/null & echo $!')
    assert server_at(node, fake.port)["interpreter"] == str(fake.python)


def test_an_orphaned_scheduler_belongs_to_the_server_of_its_session(fake: FakeServer, node: Node) -> None:
    """A scheduler that was forked twice has init as its parent and holds GPU memory all the same."""
    fake.behave(orphan=True)
    fake.start()
    until = time.monotonic() + 10
    orphan = None
    while orphan is None and time.monotonic() < until:
        server = server_at(node, fake.port)
        orphan = next((one for one in server["workers"] if one["title"] == "sglang::scheduler_DP1"), None)
    assert orphan is not None
    assert procfs.process(orphan["pid"]).ppid == 1  # type: ignore[union-attr]
    assert orphan["pid"] in server["tree"]


def test_workers_that_a_dead_server_left_behind_are_reported_as_nobodys(fake: FakeServer, node: Node) -> None:
    """They may hold a GPU's memory, and no server owns them."""
    fake.behave(orphan=True)
    pid = fake.start()
    while not (lost := [one for one in fake.pids() if (procfs.process(one) or _gone()).ppid == 1 and one != pid]):
        time.sleep(0.02)
    os.kill(pid, 9)
    while any(server["pid"] == pid for server in node.call("processes")["servers"]):
        time.sleep(0.05)
    orphans = node.call("processes")["orphans"]
    assert lost[0] in [one["pid"] for one in orphans]


def _gone() -> procfs.Process:
    return procfs.Process(0, 0, 0, 0, 0, "X", "", 0, ())


@pytest.fixture
def second(tmp_path: Path) -> Iterator[FakeServer]:
    """Another server of the same machine."""
    with FakeServer.install(tmp_path / "second") as server:
        yield server


def test_two_servers_of_one_session_keep_their_trees_apart(fake: FakeServer, second: FakeServer, node: Node) -> None:
    """One script that starts two gives both the same session; processes are told apart by parentage."""
    both = 'nohup "$@" >> "$LOG" 2>&1 </dev/null & echo $!; ' + " ".join(
        ["FAKE_SGLANG=" + str(second.root / "behaviour.json"), f"FAKE_SGLANG_TOKEN={second.token}", "nohup"]
        + [f"'{word}'" for word in second.argv]
        + [f">> '{second.log}' 2>&1 </dev/null &"]
    )
    pid = fake.start(script=both)
    second.wait_listening()
    mine, theirs = server_at(node, fake.port), server_at(node, second.port)
    assert mine["pid"] == pid
    assert not set(mine["tree"]) & set(theirs["tree"])
    assert os.getsid(mine["pid"]) == os.getsid(theirs["pid"])


def test_a_port_that_was_chosen_instead_is_the_one_reported(fake: FakeServer, node: Node) -> None:
    """The port of the configuration file counts, not the default: what the launcher listens on is looked up."""
    wanted = free_port()
    fake.port, asked = wanted, fake.port
    script = f"FAKE_PORT={wanted} " + 'nohup "$@" >> "$LOG" 2>&1 </dev/null & echo $!'
    launcher = fake.package / "launch_server.py"
    text = launcher.read_text(encoding="utf-8").replace(
        'port, ranks = int(value_of("--port", "30000"))', 'port, ranks = int(os.environ["FAKE_PORT"])'
    )
    launcher.write_text(text, encoding="utf-8")
    fake.port = asked
    fake.start(wait=False, script=script)
    fake.port = wanted
    fake.wait_listening()
    assert server_at(node, wanted)["pid"] == fake.pid


def test_a_servers_secrets_do_not_leave_the_node(fake: FakeServer, node: Node) -> None:
    """Neither in its command line nor in its environment."""
    fake.options = ("--api-key", "sk-very-secret")
    fake.environ = {"HF_TOKEN": "hf_very-secret", "SGLANG_OEA_K0": "4"}
    fake.start()
    server = server_at(node, fake.port)
    assert "very-secret" not in str(server)
    assert server["env"]["SGLANG_OEA_K0"] == "4"


def test_a_program_that_embeds_the_engine_is_no_launch_to_repeat(fake: FakeServer, node: Node) -> None:
    """Its schedulers are found, and it is said that this program must be restarted by its own command."""
    code = (
        "import os, subprocess, sys, time, http.server\n"
        "subprocess.Popen(['sglang::scheduler', '-c', 'import time; time.sleep(60)'], executable=sys.executable)\n"
        f"http.server.HTTPServer(('127.0.0.1', {fake.port}), http.server.BaseHTTPRequestHandler).serve_forever()\n"
    )
    environ = {**fake.variables(), "PYTHONHOME": sys.base_prefix}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as program:
        try:
            fake.wait_listening()
            server = server_at(node, fake.port)
            assert server["pid"] == program.pid
            assert server["supervised"]["kind"] == "program"
            with pytest.raises(SurgeonError) as refusal:
                node.call("stop", {"pid": program.pid})
            assert "another program" in refusal.value.advice
            assert program.poll() is None
        finally:
            program.kill()


def settled(pid: int) -> tuple[str, ...]:
    """A child's command line, which is empty for a moment while the kernel sets up its new program."""
    while not (argv := procfs.process(pid).argv):  # type: ignore[union-attr]
        time.sleep(0.001)
    return argv


def test_an_empty_last_argument_survives_and_a_titles_padding_does_not(fake: FakeServer) -> None:
    """A launch is repeated word by word; setproctitle leaves a long tail of NULs."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--x", ""]) as plain:
        assert settled(plain.pid)[-2:] == ("--x", "")
        plain.kill()
    words = ["sglang::scheduler", "-c", "import time; time.sleep(60)", "", "", ""]
    environ = {**fake.variables(), "PYTHONHOME": sys.base_prefix}
    with subprocess.Popen(words, executable=sys.executable, env=environ) as titled:
        assert settled(titled.pid) == tuple(words[:3])
        titled.kill()


def test_a_process_is_known_by_its_start_too() -> None:
    """A pid alone may be another process's by now."""
    me = procfs.process(os.getpid())
    assert me is not None
    assert procfs.alive(me.key)
    assert not procfs.alive((me.pid, me.start_ticks + 1))
    with subprocess.Popen(["/bin/true"]) as child:
        while Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8").split()[2] != "Z":
            time.sleep(0.01)
        zombie = procfs.process(child.pid)
        assert zombie is not None
        assert not procfs.alive(zombie.key)


def test_listeners_agree_with_the_sockets_that_are_open() -> None:
    """IPv4 and IPv6 addresses are read as the kernel writes them."""
    import socket

    with socket.socket(socket.AF_INET6) as six, socket.socket() as four:
        six.bind(("::1", 0))
        six.listen()
        four.bind(("127.0.0.2", 0))
        four.listen()
        for held, address in ((six, "::1"), (four, "127.0.0.2")):
            port = held.getsockname()[1]
            assert [one.address for one in procfs.listeners(port)] == [address]
            assert procfs.holder(port).pid == os.getpid()  # type: ignore[union-attr]


def test_asking_for_a_pid_that_serves_nothing_is_refused_by_name() -> None:
    """What is there is listed."""
    with pytest.raises(AgentError, match=f"pid {os.getpid()}"):
        processes.of_pid(os.getpid())


def test_a_scheduler_whose_launcher_is_just_ending_belongs_to_nobody() -> None:
    """The kernel has freed the launcher's memory already: neither a command line nor a program is left to read."""
    none = 2**30  # no process has this pid
    launcher = procfs.Process(none, 1, none, none, 1, "S", "python", 0, ())
    worker = procfs.Process(none + 1, none, none, none, 2, "S", "sglang::schedul", 0, ("sglang::scheduler",))
    assert processes._employer(worker, {launcher.pid: launcher, worker.pid: worker}) is None
