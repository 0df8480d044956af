"""Stopping and starting real processes: its own tree only, and again as it was."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.errors import DoesNotFitError, SurgeonError
from surgeon.node.agent import procfs
from tests.support.local_node import server_at
from tests.support.servers import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surgeon.node.client import Node

# Another user must be able to run it, which an interpreter in root's home is not for.
SYSTEM_PYTHON = Path("/usr/bin/python3")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not SYSTEM_PYTHON.exists(), reason="only root can run a server as another user"
)


@pytest.fixture
def second(tmp_path: Path) -> Iterator[FakeServer]:
    """Another server of the same machine, which must stay as it is."""
    with FakeServer.install(tmp_path / "second") as server:
        yield server


def launch_file(tmp_path: Path, port: int) -> Path:
    """Where the launch of a port is saved."""
    return tmp_path / "state" / "launch" / f"{port}.json"


def saved(tmp_path: Path, port: int) -> dict[str, Any]:
    """The saved launch of a port."""
    return dict(json.loads(launch_file(tmp_path, port).read_text(encoding="ascii")))


def test_a_restart_repeats_words_environment_folder_and_log(fake: FakeServer, node: Node, tmp_path: Path) -> None:
    """All that decides how a server runs is as before; the log goes on where it was."""
    fake.options = ("--served-model-name", "a b 'c' $HOME", "--api-key", "sk-a-real-secret")
    fake.environ = {"LAUNCH_ODD": "line one\nline two = $x", "LAUNCH_EMPTY": ""}
    before = fake.start(
        script='umask 027; ulimit -n 512; nohup nice -n 3 taskset -c 0 "$@" >> "$LOG" 2>&1 </dev/null & echo $!'
    )
    old = {name: Path(f"/proc/{before}/{name}").read_bytes() for name in ("cmdline", "environ")}
    limits = resource.prlimit(before, resource.RLIMIT_NOFILE)
    placed = (os.getpriority(os.PRIO_PROCESS, before), os.sched_getaffinity(before))
    said = fake.said()
    restarted = node.call("restart", {"pid": before, "timeout_s": 10})
    after = restarted["pid"]
    assert after != before
    assert {name: Path(f"/proc/{after}/{name}").read_bytes() for name in old} == old
    assert Path(f"/proc/{after}/cwd").readlink() == fake.root
    assert resource.prlimit(after, resource.RLIMIT_NOFILE) == limits == (512, 512)
    assert (os.getpriority(os.PRIO_PROCESS, after), os.sched_getaffinity(after)) == placed == (3, {0})
    assert "Umask:\t0027" in Path(f"/proc/{after}/status").read_text(encoding="utf-8")
    assert restarted["log"] == str(fake.log)
    fake.wait_listening()
    new = fake.said()[restarted["log_offset"] :]
    assert fake.said().startswith(said)
    assert new.startswith("server_args=")
    assert json.dumps(fake.environ["LAUNCH_ODD"]) in new
    assert stat.S_IMODE(launch_file(tmp_path, fake.port).stat().st_mode) == 0o600
    assert saved(tmp_path, fake.port)["phase"] == "started"


def test_a_restarted_server_outlives_us_with_nothing_of_ours_open(fake: FakeServer, node: Node) -> None:
    """It has a session of its own, init as its parent, three streams, and no descriptor of the agent's."""
    fake.start()
    pid = node.call("restart", {"pid": fake.pid, "timeout_s": 10})["pid"]
    process = procfs.process(pid)
    assert process is not None
    assert process.ppid == 1
    assert process.sid not in {os.getsid(0), procfs.process(os.getpid()).pid}  # type: ignore[union-attr]
    fake.wait_listening()
    targets = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    assert sorted(one for one in targets if not one.startswith(("socket:", "anon_inode:"))) == sorted(
        ["/dev/null", str(fake.log), str(fake.log)]
    )
    assert str(Path(f"/proc/{pid}/fd/0").readlink()) == "/dev/null"
    ignored = int(procfs.status(pid)["SigIgn"], 16)
    assert ignored & (1 << (signal.SIGHUP - 1)), "nohup's wish is kept"


def test_only_the_servers_own_processes_are_stopped(fake: FakeServer, second: FakeServer, node: Node) -> None:
    """Another server of the same user, with the same titles, does not notice."""
    fake.start()
    second.start()
    theirs = {pid: procfs.process(pid) for pid in second.pids()}
    stopped = node.call("stop", {"pid": fake.pid, "timeout_s": 10})
    assert fake.pid in stopped["stopped"]
    assert fake.pids() == []
    assert {pid: procfs.process(pid) for pid in second.pids()}.keys() == theirs.keys()
    assert not set(stopped["stopped"]) & set(theirs)


def test_processes_that_ignore_a_request_to_end_are_killed(fake: FakeServer, node: Node) -> None:
    """TERM first, KILL after the timeout, orphaned schedulers too; it is told which had to be killed."""
    fake.behave(ignore_term=True, orphan=True)
    fake.start()
    while len(fake.pids()) < 4:
        time.sleep(0.02)
    before = set(fake.pids())
    time.sleep(0.5)
    stopped = node.call("stop", {"pid": fake.pid, "timeout_s": 1})
    assert fake.pids() == []
    assert set(stopped["stopped"]) >= before
    assert fake.pid in stopped["killed"]


def test_an_orphan_that_outlives_its_launcher_is_ended_with_it(fake: FakeServer, node: Node) -> None:
    """A scheduler that keeps 100 GB of GPU memory after the job is gone would leave none for the next."""
    fake.behave(orphan=True)
    fake.start()
    while len(fake.pids()) < 4:
        time.sleep(0.02)
    node.call("stop", {"pid": fake.pid, "timeout_s": 10})
    assert fake.pids() == []


def test_a_stopped_server_is_known_as_down_because_of_us_and_can_be_started(
    fake: FakeServer, node: Node, tmp_path: Path
) -> None:
    """The next command can tell, and `start` needs no more than what was saved."""
    fake.start()
    stopped = node.call("stop", {"pid": fake.pid, "timeout_s": 10})
    assert saved(tmp_path, fake.port)["phase"] == "stopped"
    launch = node.call("survey", {"port": fake.port, "python": str(fake.python)})["launch"]
    assert launch["phase"] == "stopped"
    assert launch["port"] == fake.port
    assert not launch["alive"]
    started = node.call("start", {"launch": stopped["launch"]})
    fake.wait_listening()
    assert server_at(node, fake.port)["pid"] == started["pid"]


def test_a_restart_without_a_pid_starts_what_surgeon_stopped(fake: FakeServer, node: Node) -> None:
    """After a run that broke off between stop and start, the same command mends it."""
    fake.start()
    node.call("stop", {"pid": fake.pid, "timeout_s": 10})
    started = node.call("restart", {"pid": None})
    fake.wait_listening()
    assert server_at(node, fake.port)["pid"] == started["pid"]


def test_a_second_server_is_never_started_for_one_port(fake: FakeServer, node: Node) -> None:
    """While the first still loads, the port is free, and a twin would take the GPU's memory."""
    fake.start()
    fake.behave(start_s=60)
    started = node.call("restart", {"pid": fake.pid, "timeout_s": 10})
    with pytest.raises(SurgeonError, match=f"running already, as pid {started['pid']}"):
        node.call("start", {"launch": str(fake.port)})


def test_a_port_that_another_took_is_named_and_nothing_is_started(fake: FakeServer, node: Node) -> None:
    """The message says which process listens there."""
    fake.start()
    node.call("stop", {"pid": fake.pid, "timeout_s": 10})
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", fake.port))
        taken.listen()
        with pytest.raises(SurgeonError, match=rf"pid {os.getpid()} "):
            node.call("start", {"launch": str(fake.port)})
    assert fake.pids() == []


def test_a_server_that_dies_at_once_is_reported_with_its_status_and_last_words(
    fake: FakeServer, node: Node, tmp_path: Path
) -> None:
    """Within a second of its start its exit status is known, and its launch is kept for the next try."""
    fake.start()
    fake.topk.write_bytes(b"def broken(:\n")
    with pytest.raises(SurgeonError, match=r"exit status 1; .*SyntaxError"):
        node.call("restart", {"pid": fake.pid, "timeout_s": 10})
    assert saved(tmp_path, fake.port)["phase"] == "stopped"


def test_a_program_that_is_gone_is_reported_as_such(fake: FakeServer, node: Node) -> None:
    """The interpreter was removed meanwhile."""
    fake.start()
    node.call("stop", {"pid": fake.pid, "timeout_s": 10})
    fake.python.unlink()
    with pytest.raises(SurgeonError, match="FileNotFoundError"):
        node.call("start", {"launch": str(fake.port)})


def test_a_server_that_wrote_to_a_terminal_or_a_pipe_gets_a_log(fake: FakeServer, node: Node, tmp_path: Path) -> None:
    """Its output would be lost otherwise; it is said where it goes."""
    reading, writing = os.pipe()
    with subprocess.Popen(
        fake.argv, env=fake.variables(), cwd=fake.root, stdout=writing, stderr=writing, start_new_session=True
    ) as started:
        os.close(writing)
        fake.wait_listening()
        restarted = node.call("restart", {"pid": started.pid, "timeout_s": 10})
    os.close(reading)
    log = tmp_path / "state" / "logs" / f"server-{fake.port}.log"
    assert restarted["log"] == str(log)
    assert "a pipe" in restarted["notes"][0]
    fake.wait_listening()
    assert "fired up" in log.read_text(encoding="utf-8")
    again = node.call("restart", {"pid": restarted["pid"], "timeout_s": 10})
    assert again["log"] == str(log)
    assert again["notes"] == []


def test_a_log_that_goes_two_ways_goes_two_ways_again(fake: FakeServer, node: Node) -> None:
    """Standard error may have a file of its own."""
    errors = fake.root / "errors.log"
    fake.start(script=f'nohup "$@" >> "$LOG" 2>> \'{errors}\' </dev/null & echo $!')
    before = errors.stat().st_size
    node.call("restart", {"pid": fake.pid, "timeout_s": 10})
    fake.wait_listening()
    assert errors.stat().st_size > before


def test_a_supervised_server_is_left_to_its_supervisor(fake: FakeServer, node: Node) -> None:
    """Stopped by hand, it would come back unpatched; the refusal names the command to use."""
    keeper = fake.root / "supervisord"
    keeper.write_text('#!/bin/sh\n"$@" >> "$LOG" 2>&1 </dev/null &\necho $!\nwait\n', encoding="utf-8")
    keeper.chmod(0o755)
    fake.start(script=f"'{keeper}' \"$@\" > '{fake.root}/pid' & sleep 0.5; cat '{fake.root}/pid'")
    assert server_at(node, fake.port)["supervised"]["kind"] == "supervisord"
    with pytest.raises(DoesNotFitError, match="supervisord") as refusal:
        node.call("restart", {"pid": fake.pid, "timeout_s": 10})
    assert "supervisorctl restart" in refusal.value.advice
    assert fake.pid in fake.pids()


def test_a_loop_that_starts_it_again_is_found_out(fake: FakeServer, node: Node) -> None:
    """A shell loop leaves no trace before the stop; after it, the twin is named."""
    loop = 'sh -c \'while :; do "$0" "$@"; done\' "$@" >> "$LOG" 2>&1 </dev/null & sleep 0.3; pgrep -P $!'
    fake.start(script=loop)
    with pytest.raises(SurgeonError, match=r"started the server again at once, as pid \d+"):
        node.call("stop", {"pid": fake.pid, "timeout_s": 10})


def test_a_dropped_connection_does_not_leave_the_server_down(fake: FakeServer, node: Node, tmp_path: Path) -> None:
    """The agent that is restarting a server goes on when its session hangs up."""
    fake.behave(ignore_term=True)
    fake.start()
    time.sleep(0.5)
    code = (
        "import sys,time;from pathlib import Path;from tests.support.local_node import context;"
        "from surgeon.node.agent import lifecycle;"
        f"lifecycle.restart({{'pid': {fake.pid}, 'timeout_s': 1}}, context(Path({str(tmp_path / 'state')!r})))"
    )
    assert node.call("processes")["servers"]
    agent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], start_new_session=True)
    while not launch_file(tmp_path, fake.port).exists():
        time.sleep(0.02)
    os.killpg(agent.pid, signal.SIGHUP)
    assert agent.wait(20) == 0
    fake.wait_listening()
    assert server_at(node, fake.port)["pid"] != fake.pid


@needs_root
def test_a_server_of_another_user_is_started_as_that_user(node: Node, tmp_path: Path) -> None:
    """Root's agent takes that user's id, group and no more of root's; the log stays that user's."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    nobody = 65534
    with FakeServer.install(tmp_path / "theirs", base=SYSTEM_PYTHON) as fake:
        os.chown(fake.root, nobody, nobody)
        fake.start(
            script="setpriv --reuid 65534 --regid 65534 --clear-groups sh -c "
            '\'nohup "$0" "$@" >> "$LOG" 2>&1 </dev/null & echo $!\' "$@"'
        )
        restarted = node.call("restart", {"pid": fake.pid, "timeout_s": 10})
        status = procfs.status(restarted["pid"])
        assert status["Uid"].split() == status["Gid"].split() == [str(nobody)] * 4
        assert status["Groups"] == ""
        fake.wait_listening()
        assert fake.log.stat().st_uid == nobody
        ran = node.call("run", {"pid": restarted["pid"], "code": "import os; print(os.getuid(), os.getgroups())"})
        assert ran["stdout"].split() == [str(nobody), "[]"]
