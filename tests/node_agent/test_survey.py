"""One look at a node: everything that an operation needs, and the facts that it decides on."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.node.agent import interpreter, processes, survey
from surgeon.node.agent.state import site_id
from tests.support.local_node import context, server_at
from tests.support.packages import TOPK, install_package
from tests.support.servers import FakeServer
from tests.support.wheels import member

if TYPE_CHECKING:
    from surgeon.node.client import Node


def look(node: Node, fake: FakeServer, **more: Any) -> dict[str, Any]:
    """Survey the node for one server; others may run on this machine too."""
    return node.call("survey", {"python": None, "port": fake.port, "pid": None, "http": True, **more})


def codes(seen: dict[str, Any]) -> set[str]:
    """Codes of the problems; other people's orphans on this machine are none of ours."""
    return {one["code"] for one in seen["problems"]} - {"orphan-worker"}


@pytest.mark.wheels
def test_a_running_server_tells_all_of_its_installation(node: Node, tmp_path: Path) -> None:
    """Interpreter, package, topk.py of a real release, model and resolved arguments, compared with the files."""
    real, executor = member("0.5.9"), member("0.5.9", "sglang/srt/model_executor/model_runner.py")
    with FakeServer.install(tmp_path / "real", topk=real, runner=executor, options=("--tp", "2")) as server:
        pid = server.start()
        seen = look(node, server)
        assert seen["chosen"] == pid
        asked = seen["interpreter"]
        assert (asked["path"], asked["source"]) == (str(server.python), "server")
        assert asked["version"] == platform.python_version()
        assert asked["sys_path"][0] == str(server.root)
        assert str(server.site) in asked["sys_path"]
        package = seen["package"]
        assert package["dir"] == str(server.package)
        assert package["version"] == "0.5.9"
        assert package["site_id"] == hashlib.sha256(str(server.site.resolve()).encode()).hexdigest()[:12]
        assert "transformers==4.57.1" in package["requires"]
        topk = seen["topk"]
        assert base64.b64decode(topk["b64"]) == real
        assert topk["sha256"] == topk["record_sha256"] == hashlib.sha256(real).hexdigest()
        status = server.topk.stat()
        assert (topk["mode"], topk["nlink"], topk["mtime_ns"]) == (
            status.st_mode & 0o7777,
            status.st_nlink,
            status.st_mtime_ns,
        )
        assert topk["writable"]
        runner = seen["runner"]
        assert base64.b64decode(runner["b64"]) == executor
        assert runner["sha256"] == runner["record_sha256"] == hashlib.sha256(executor).hexdigest()
        assert seen["model"] == {
            "path": str(server.model),
            "name": str(server.model),
            "config": json.loads((server.model / "config.json").read_text(encoding="utf-8")),
        }
        assert seen["server_info"]["tp_size"] == 2
        assert "internal_states" not in seen["server_info"]
        assert [one["package_dir"] for one in seen["installations"]] == [str(server.package)]
        assert ("sglang", "0.5.9", "pip") in [
            (one["name"], one["version"], one["installer"]) for one in seen["packages"]
        ]
        assert codes(seen) == set()


def test_the_interpreter_is_asked_in_the_servers_environment_and_folder(fake: FakeServer, node: Node) -> None:
    """PYTHONPATH of the launch and a package in the working directory decide what the server imports."""
    shadow = install_package(fake.root / "shadow", dist_info=False, version="9.9")
    fake.environ = {"PYTHONPATH": "shadow"}
    fake.start()
    seen = look(node, fake)
    assert seen["package"]["dir"] == str(shadow)
    assert seen["package"]["version"] == "9.9"
    assert seen["package"]["dist_info"] is None
    assert {one["package_dir"] for one in seen["installations"]} == {str(shadow), str(fake.package)}
    assert "two-installations" in codes(seen)


def test_a_script_launch_imports_from_the_scripts_folder(fake: FakeServer, node: Node) -> None:
    """`sglang serve` puts its own folder first on the path, not the working directory."""
    script = fake.python.parent / "sglang"
    script.write_text(
        f"#!{fake.python}\nimport runpy\nrunpy.run_module('sglang.launch_server', run_name='__main__')\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    fake.start(script=f'shift 3; nohup \'{script}\' serve "$@" >> "$LOG" 2>&1 </dev/null & echo $!')
    seen = look(node, fake)
    assert seen["interpreter"]["path"] == str(fake.python)
    assert seen["interpreter"]["sys_path"][0] == str(fake.python.parent)
    assert seen["package"]["dir"] == str(fake.package)


def test_sglang_is_never_imported_by_a_survey(fake: FakeServer, node: Node) -> None:
    """Importing it takes half a minute, and may fail for the very reason that one surveys."""
    trap = fake.root / "imported"
    fake.start()
    (fake.package / "__init__.py").write_text(f"open({str(trap)!r}, 'w')\n", encoding="utf-8")
    assert look(node, fake)["package"]["dir"] == str(fake.package)
    assert not trap.exists()


def test_a_leftover_folder_is_reported_as_hiding_the_package(fake: FakeServer, node: Node) -> None:
    """It is no installation, and it is named."""
    ghost = fake.root / "ghost" / "sglang"
    (ghost / "__pycache__").mkdir(parents=True)
    fake.environ = {"PYTHONPATH": str(ghost.parent)}
    fake.start()
    seen = look(node, fake)
    assert seen["package"]["dir"] == str(fake.package)
    problem = next(one for one in seen["problems"] if one["code"] == "ghost-namespace")
    assert problem["where"] == str(ghost)


def test_an_edited_file_and_what_lies_beside_it_are_told(fake: FakeServer, node: Node) -> None:
    """Whether somebody edited topk.py shows in the recorded hash; runtime and settings come with their hashes."""
    fake.start()
    fake.topk.write_bytes(TOPK + b"# edited\n")
    runtime, settings = (fake.topk.with_name("_surgeon_oea" + ending) for ending in (".py", ".json"))
    runtime.write_bytes(b"active = True\n")
    settings.write_text('{"k0": 4}', encoding="utf-8")
    (fake.topk.parent / "_surgeon_oea_operator.py").write_bytes(b"one = 1\n")
    seen = look(node, fake, module="_surgeon_oea", parts=["_surgeon_oea_operator", "_surgeon_oea_kernel"])
    assert seen["topk"]["record_sha256"] == hashlib.sha256(TOPK).hexdigest() != seen["topk"]["sha256"]
    assert seen["beside"]["runtime"] == {
        "path": str(runtime),
        "sha256": hashlib.sha256(runtime.read_bytes()).hexdigest(),
    }
    assert seen["beside"]["_surgeon_oea_operator"]["sha256"] == hashlib.sha256(b"one = 1\n").hexdigest()
    assert seen["beside"]["_surgeon_oea_kernel"] is None
    assert (seen["runner"], seen["present"]) == (None, {})
    assert seen["beside"]["settings"]["text"] == '{"k0": 4}'


def test_a_symbolic_link_and_a_hard_link_are_told_apart(fake: FakeServer, node: Node) -> None:
    """Hard links of uv are safe to replace; a link to elsewhere is not."""
    fake.start()
    (fake.root / "cache.py").hardlink_to(fake.topk)
    assert look(node, fake)["topk"]["nlink"] == 2
    fake.topk.unlink()
    fake.topk.symlink_to(fake.root / "cache.py")
    topk = look(node, fake)["topk"]
    assert topk["link"] == str(fake.root / "cache.py")
    assert not topk["writable"]
    assert "symbolic link" in topk["why_not"]


def test_several_servers_and_no_choice_choose_none(fake: FakeServer, node: Node, tmp_path: Path) -> None:
    """Facts only: both are listed, and a port or a pid decides."""
    with FakeServer.install(tmp_path / "second") as second:
        fake.start()
        second.start()
        seen = node.call("survey", {})
        assert {fake.port, second.port} <= {one["port"] for one in seen["servers"]}
        assert seen["chosen"] is None
        assert seen["package"] is None
        assert node.call("survey", {"pid": second.pid})["package"]["dir"] == str(second.package)
        assert look(node, fake)["package"]["dir"] == str(fake.package)


def test_a_named_interpreter_counts_without_a_server(fake: FakeServer, node: Node) -> None:
    """And its answer says that it was named."""
    seen = node.call("survey", {"python": str(fake.python), "port": fake.port})
    assert seen["chosen"] is None
    assert seen["interpreter"]["source"] == "option"
    assert seen["package"]["dir"] == str(fake.package)
    assert seen["model"] is None


def test_a_named_interpreter_that_cannot_be_asked_is_a_problem_and_no_failure(node: Node, tmp_path: Path) -> None:
    """The survey still tells the rest."""
    seen = node.call("survey", {"python": str(tmp_path / "python"), "port": 1})
    assert seen["package"] is None
    assert "interpreter" in codes(seen)
    bare = node.call("survey", {"python": sys.executable, "port": 1})
    assert bare["interpreter"]["version"] == platform.python_version()
    assert bare["package"] is None
    assert bare["installations"] == []


def test_without_a_server_the_known_places_are_searched(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An activated environment and one in the home directory; those without sglang are not even asked."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".venv").symlink_to(fake.root / "venv")
    monkeypatch.setattr(processes, "find", lambda: ([], []))
    monkeypatch.setattr(interpreter, "_PLACES", ("~/.venv", "~/venv"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    (tmp_path / "state").mkdir(mode=0o700)
    seen = survey.survey({}, context(tmp_path / "state"))
    assert seen["interpreter"]["source"] == "path"
    assert seen["package"]["dir"] == str(fake.package)
    with FakeServer.install(tmp_path / "other") as other:
        monkeypatch.setenv("VIRTUAL_ENV", str(other.root / "venv"))
        seen = survey.survey({}, context(tmp_path / "state"))
    assert seen["interpreter"] is None, "two are found, and nothing says which one counts"
    assert {one["package_dir"] for one in seen["installations"]} == {str(fake.package), str(other.package)}
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("VIRTUAL_ENV", "")
    assert survey.survey({}, context(tmp_path / "state"))["installations"] == []


def test_a_start_up_file_that_prints_does_not_confuse_the_answer(fake: FakeServer, node: Node) -> None:
    """A sitecustomize may say anything on standard output."""
    (fake.site / "sitecustomize.py").write_text('print(\'{"version": "fake"}\')\n', encoding="utf-8")
    fake.start()
    assert look(node, fake)["interpreter"]["version"] == platform.python_version()


def test_beacons_are_alive_only_with_pid_and_start_time(fake: FakeServer, node: Node, tmp_path: Path) -> None:
    """A pid that another process has by now proves nothing; broken files are told, not believed."""
    fake.start()
    worker = server_at(node, fake.port)["workers"][0]
    folder = tmp_path / "state" / "beacons"
    folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    one = {"pid": worker["pid"], "start_ticks": worker["start_ticks"]}
    (elsewhere / "1.json").write_text(json.dumps(one), encoding="utf-8")
    (folder / "2.json").write_text(json.dumps({**one, "start_ticks": 1}), encoding="utf-8")
    (folder / "3.json").write_text("{", encoding="utf-8")
    (folder / "4.json").write_text(" " * 70_000, encoding="utf-8")
    fake.topk.with_name("_surgeon_oea.json").write_text(json.dumps({"beacon_dir": str(elsewhere)}), encoding="utf-8")
    beacons = {Path(one["path"]).name: one for one in look(node, fake)["beacons"]}
    assert beacons["1.json"]["alive"]
    assert not beacons["2.json"]["alive"]
    assert "problem" in beacons["3.json"]
    assert "problem" in beacons["4.json"]


def test_a_model_of_the_hub_is_found_in_the_servers_own_cache(fake: FakeServer, node: Node, tmp_path: Path) -> None:
    """HF_HOME of the server decides, and the snapshot is the one that the branch points to."""
    repository = tmp_path / "hf" / "hub" / "models--org--glm"
    for commit, experts in (("a" * 40, 1), ("b" * 40, 2)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text(json.dumps({"n": experts}), encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40, encoding="utf-8")
    fake.options = ("--model-path", "org/glm")
    fake.environ = {"HF_HOME": str(tmp_path / "hf")}
    fake.start()
    model = look(node, fake)["model"]
    assert model["name"] == "org/glm"
    assert model["config"] == {"n": 2}


def test_gpus_are_read_from_nvidia_smi(fake: FakeServer, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in MiB; a driver that hangs or fails is no GPU."""
    tool = fake.root / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        "echo '0, NVIDIA RTX PRO 6000 Blackwell Server Edition, GPU-1, 97887, 3, 12.0, 590.10'\n"
        "echo '1, NVIDIA RTX PRO 6000 Blackwell Server Edition, GPU-2, 97887, [N/A], 12.0, 590.10'\n",
        encoding="utf-8",
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.root}:{os.environ['PATH']}")
    gpus = node.call("survey", {"python": str(fake.python), "port": 1})["gpus"]
    assert [one["memory_total"] for one in gpus] == [97887, 97887]
    assert gpus[0]["compute_cap"] == "12.0"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML'; exit 18\n", encoding="utf-8")
    assert node.call("survey", {"python": str(fake.python), "port": 1})["gpus"] == []


def test_a_server_that_does_not_answer_costs_two_seconds_at_most(fake: FakeServer, node: Node) -> None:
    """The rest of the survey is there all the same."""
    fake.start(wait=False)
    fake.wait_listening()
    os.kill(fake.pid, 19)
    began = time.monotonic()
    seen = look(node, fake)
    assert time.monotonic() - began < 6
    assert seen["server_info"] is None
    assert seen["package"] is not None


def test_ledger_and_documents_of_the_installation_come_along(fake: FakeServer, node: Node) -> None:
    """One round trip answers what a plan needs."""
    fake.start()
    site = site_id(str(fake.site))
    lease = node.call("lease", {"site_id": site, "action": "acquire", "owner": "o", "host": "h", "pid": 1, "ttl_s": 60})
    node.call("document", {"site_id": site, "name": "baseline", "value": {"x": 1}})
    seen = look(node, fake)
    assert seen["ledger"]["lease"]["token"] == lease["token"]
    assert seen["ledger"]["records"] == []
    assert seen["documents"]["baseline"]["x"] == 1


def test_a_survey_changes_nothing_in_the_package(fake: FakeServer, node: Node) -> None:
    """Not even bytecode is written."""

    def state() -> str:
        listing = ["/usr/bin/find", str(fake.root / "venv"), "-printf", "%p %T@ %s\n"]
        return subprocess.run(listing, capture_output=True, text=True, check=True).stdout

    fake.start()
    before = state()
    look(node, fake)
    assert state() == before


def test_every_file_that_the_ledger_ever_wrote_is_told_of(fake: FakeServer, node: Node) -> None:
    """Also those that no version of today ships: a rollback to an old revision needs to know what is there."""
    fake.start()
    old, gone = fake.topk.parent / "_surgeon_old.py", fake.topk.parent / "_surgeon_gone.py"
    site = {"site_id": site_id(str(fake.site))}
    node.lease = node.call("lease", {**site, "action": "acquire"})["token"]
    files = [
        {"path": str(path), "b64": base64.b64encode(b"x = 1\n").decode(), "expect": None, "like": str(fake.topk)}
        for path in (old, gone)
    ]
    node.call("commit", {**site, "record": {"kind": "apply"}, "files": files, "interpreter": sys.executable})
    gone.unlink()
    digest = hashlib.sha256(b"x = 1\n").hexdigest()
    assert look(node, fake)["present"] == {str(old): digest, str(gone): None}
