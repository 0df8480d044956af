"""Who would start a server again: told from cgroups, environment and parents as they look on real systems."""

from __future__ import annotations

import pytest

from surgeon.node.agent import procfs, supervisors
from surgeon.node.agent.procfs import Process

SERVER = ("/opt/venv/bin/python", "-m", "sglang.launch_server", "--model-path", "M")


def process(pid: int, ppid: int, comm: str, *argv: str) -> Process:
    """A process as /proc tells of it."""
    return Process(pid, ppid, pid, pid, 100 + pid, "S", comm, 0, argv or (comm,))


def judge(
    monkeypatch: pytest.MonkeyPatch, cgroup: str, *others: Process, environ: dict[str, str] | None = None, **at: int
) -> tuple[str, str] | None:
    """The kind and unit of a server's supervisor."""
    monkeypatch.setattr(supervisors, "_cgroup", lambda _pid: cgroup)
    launcher = process(at.get("pid", 4_000_000), at.get("ppid", 1), "python", *SERVER)
    everybody = {one.pid: one for one in (launcher, *others)}
    found = supervisors.supervisor(launcher, everybody, environ or {})
    if found is not None:
        assert found["advice"]
    return (found["kind"], found["unit"]) if found is not None else None


UNIT = "0::/system.slice/sglang.service\n"
USER_UNIT = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/glm.service\n"


def test_a_unit_of_systemd_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system and of a user, on cgroup v1 and v2."""
    invoked = {"INVOCATION_ID": "0" * 32}
    assert judge(monkeypatch, UNIT, environ=invoked) == ("systemd", "sglang.service")
    assert judge(monkeypatch, USER_UNIT, environ=invoked) == ("systemd", "glm.service")
    hybrid = "12:memory:/\n1:name=systemd:/system.slice/sglang.service\n"
    assert judge(monkeypatch, hybrid, environ=invoked) == ("systemd", "sglang.service")


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/system.slice/ssh.service\n",
        "0::/user.slice/user-0.slice/session-5.scope\n",
        "0::/user.slice/user-1000.slice/user@1000.service/tmux-spawn-1.scope\n",
        "0::/\n",
        "",
    ],
)
def test_what_was_started_from_a_session_has_no_supervisor(cgroup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PAM, nohup over SSH stays in sshd's own unit; tmux and login sessions are scopes."""
    assert judge(monkeypatch, cgroup) is None
    assert judge(monkeypatch, cgroup, process(50, 1, "tmux: server"), ppid=50) is None


def test_a_shell_between_does_not_hide_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """`supervisord -> bash run.sh -> python`."""
    others = (
        process(60, 1, "supervisord", "/usr/bin/python3", "/usr/bin/supervisord"),
        process(61, 60, "bash", "bash", "run.sh"),
    )
    assert judge(monkeypatch, "", *others, ppid=61) == ("supervisord", "pid 60")


def test_the_first_process_of_a_container_takes_the_container_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pid 1, or as what pid 1 was told to run; what `docker exec` started is not."""
    assert judge(monkeypatch, "", pid=1, ppid=0) == ("container-init", "pid 1")
    tini = process(1, 0, "tini", "/usr/bin/tini", "--", *SERVER)
    assert judge(monkeypatch, "", tini) == ("container-init", "tini")
    idle = process(1, 0, "tini", "/usr/bin/tini", "--", "sleep", "infinity")
    assert judge(monkeypatch, "", idle) is None


def test_a_container_seen_from_its_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are elsewhere: another mount namespace, and the container's id in the cgroup."""
    spaces = {"ns/mnt": "mnt:[2]"}
    monkeypatch.setattr(procfs, "link", lambda pid, name: spaces[name] if pid == 4_000_000 else "mnt:[1]")
    docker = "0::/system.slice/docker-0123456789abcdef0123456789abcdef.scope\n"
    assert judge(monkeypatch, docker) == ("docker", "0123456789ab")
    podman = "0::/machine.slice/libpod-0123456789abcdef0123456789abcdef.scope/container\n"
    assert judge(monkeypatch, podman) == ("podman", "0123456789ab")
    assert judge(monkeypatch, "0::/\n") == ("container", "")
