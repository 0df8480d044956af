"""What the lab makes of a description that is stale, broken or missing, and what `down` leaves."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from surgeon import lab
from surgeon.cli.lab import app
from surgeon.errors import SurgeonError
from surgeon.lab import lifecycle, processes, server, sshd
from surgeon.lab.lifecycle import Description, Wanted
from surgeon.lab.paths import paths

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cache")

LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
time.sleep(300)
"""


def description() -> Description:
    """Of a lab that ran once, on a port where nobody listens now."""
    return Description(
        wanted=Wanted(sglang="0.5.9", ranks=2, bias=0.5, seed=7),
        host="lab",
        ssh_config=str(paths().node / "ssh" / "ssh_config"),
        ssh_kind="openssh",
        ssh_port=1,
        python="/nowhere/bin/python",
        state_dir=str(paths().state),
        port=9,
        pid=1,
        log=str(paths().logs / "sglang-9.log"),
        model="/nowhere/model",
        recordings="",
    )


def leave_a_stale_lab() -> None:
    """Write lab.json as a machine that was switched off leaves it."""
    paths().lab.mkdir(parents=True)
    paths().description.write_text(json.dumps(description().as_json()), encoding="utf-8")


def start_a_server_like_family(folder: Path) -> list[processes.Process]:
    """A launcher with a worker, which carry the mark of this cache's lab."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = processes.detach(
        [sys.executable, "-c", LAUNCHER, server.FAULTS_VARIABLE],
        log=folder / "log",
        cwd=folder,
        env={server.FAULTS_VARIABLE: str(paths().faults)},
    )
    while len(processes.descendants({pid})) < 2:
        assert processes.look_up(pid) is not None
        time.sleep(0.05)
    return processes.descendants({pid})


def test_a_description_reads_back_as_it_was_written() -> None:
    """lab.json loses nothing."""
    text = json.dumps(description().as_json())
    assert Description.parse(text) == description()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "surgeon/lab/1"}', "null"])
def test_a_broken_description_is_no_lab(text: str) -> None:
    """What cannot be read counts as no lab, so that `up` writes a new one."""
    paths().lab.mkdir(parents=True)
    paths().description.write_text(text, encoding="utf-8")
    assert lifecycle.read() is None


def test_without_a_lab_the_host_named_lab_says_how_to_get_one() -> None:
    """`--host lab` refuses with the command that brings a lab up."""
    with pytest.raises(SurgeonError, match="No lab is up") as refused:
        lab.target()
    assert refused.value.advice == "Bring one up: surgeon lab up"


def test_the_lab_is_a_node_like_any_other() -> None:
    """Its target goes through ssh with the lab's own configuration, state and port."""
    leave_a_stale_lab()
    target = lab.target()
    assert (target.host, str(target.ssh_config)) == ("lab", description().ssh_config)
    assert (target.port, target.python, target.state_dir) == (9, "/nowhere/bin/python", str(paths().state))
    assert target.host_key_policy == "strict"


def test_a_stale_description_is_told_from_a_running_lab() -> None:
    """After a reboot lab.json is there and nothing runs: status says so."""
    leave_a_stale_lab()
    now = lifecycle.status()
    assert now.description == description()
    assert (now.server_pid, now.serving, now.ssh, now.processes) == (None, False, None, 0)


def test_down_after_a_reboot_just_forgets_the_lab() -> None:
    """A stale lab.json does no harm; nobody else's process is touched, though its pid was 1."""
    leave_a_stale_lab()
    assert lifecycle.down() == 0
    assert lifecycle.read() is None


def test_down_ends_the_servers_family_and_the_ssh_server(tmp_path: Path) -> None:
    """Nothing of the lab runs after `down`, and a fault that was injected is gone."""
    family = start_a_server_like_family(tmp_path)
    ssh = sshd.start(paths().node / "ssh")
    paths().faults.write_text("{}", encoding="utf-8")
    assert {process.pid for process in server.mine()} == {process.pid for process in family}
    assert lifecycle.down() == 2
    assert [process for process in family if processes.alive(process)] == []
    assert processes.look_up(ssh.pid) is None
    assert not paths().faults.exists()
    assert lifecycle.status().processes == 0


def test_down_finds_a_worker_whose_launcher_is_gone(tmp_path: Path) -> None:
    """An orphaned worker is the lab's all the same."""
    launcher, worker = start_a_server_like_family(tmp_path)
    processes.end([launcher])
    assert processes.alive(worker)
    assert lifecycle.down() == 1
    assert not processes.alive(worker)


def test_status_prints_one_json_object() -> None:
    """`lab status --json` is one object with the schema's name."""
    done = CliRunner().invoke(app, ["status", "--json"])
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["ok"], answer["result"]["lab"]) == ("surgeon/lab-status/1", True, None)


def test_a_refusal_is_json_too() -> None:
    """`lab up --json` for a release without a recipe: exit code 2 and the problem in the object."""
    done = CliRunner().invoke(app, ["up", "--sglang", "0.1", "--json"])
    assert done.exit_code == 2
    answer = json.loads(done.stdout)
    assert (answer["ok"], answer["problems"][0]["code"]) == (False, "usage")


def test_logs_without_a_log_say_so() -> None:
    """There is nothing to show before the first start."""
    done = CliRunner().invoke(app, ["logs"])
    assert done.exit_code == 1
    assert "no log yet" in done.stderr


def test_logs_print_the_last_lines_of_the_last_server() -> None:
    """Also after `down`, the newest log is the one to read."""
    paths().logs.mkdir(parents=True)
    (paths().logs / "sglang-9.log").write_text("one\ntwo\nthree\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["logs", "-n", "2"])
    assert done.stdout == "two\nthree\n"
