"""Which command lines launch a server, and what they ask for."""

from __future__ import annotations

import shlex

import pytest

from surgeon.node.agent import cmdline

LAUNCHES = [
    "python -m sglang.launch_server --model-path M",
    "/opt/venv/bin/python3.12 -u -m sglang.launch_server --model M",
    "python3 -X dev -W ignore -m sglang.launch_server --model M",
    "python -um sglang.launch_server",
    "python -msglang.launch_server",
    "/venv/bin/python /venv/bin/sglang serve --model-path M",
    "python -m sglang serve --model-path M",
    "python -m sglang.cli.main serve M",
    "python3 /sgl-workspace/sglang/python/sglang/launch_server.py --model-path M",
    "python launch_server.py --model-path M",
]
OTHERS = [
    "python -m sglang.bench_serving --backend sglang",
    "python -m sglang.check_env",
    "python /venv/bin/sglang generate --model-path M",
    "python launch_server.py --config other-engine.yaml",
    "python -c 'import os' -m sglang.launch_server",
    "python train.py -m sglang.launch_server",
    "python",
    "python -i",
]


@pytest.mark.parametrize("line", LAUNCHES)
def test_every_way_to_launch_a_server_is_recognised(line: str) -> None:
    """Module, console script and script file; options of the interpreter before them do not hide it."""
    program = cmdline.program(shlex.split(line))
    assert program is not None
    assert cmdline.serving(program)


@pytest.mark.parametrize("line", OTHERS)
def test_other_programs_are_no_servers(line: str) -> None:
    """Benchmarks, other subcommands, other people's launch_server.py, and words after the program."""
    program = cmdline.program(shlex.split(line))
    assert program is None or not cmdline.serving(program)


def test_options_of_the_interpreter_are_kept_apart() -> None:
    """They are repeated when the same interpreter is asked a question."""
    program = cmdline.program(shlex.split("python -u -s -X dev -m sglang.launch_server --port 1"))
    assert program is not None
    assert program.options == ("-u", "-s", "-X", "dev")
    assert program.args == ("--port", "1")
    glued = cmdline.program(["python", "-sm", "sglang.launch_server"])
    assert glued is not None
    assert glued.options == ("-s",)


@pytest.mark.parametrize(
    ("args", "port"),
    [("--port 31000", 31000), ("--port=31001", 31001), ("--port 1 --port 2", 2), ("--host x", 30000), ("", 30000)],
)
def test_the_port_is_the_last_one_asked_for_or_the_default(args: str, port: int) -> None:
    """As argparse takes it; sglang's default is 30000."""
    assert cmdline.port(shlex.split(args)) == port


@pytest.mark.parametrize(
    ("path", "python"),
    [("/a/python", True), ("python3.13t", True), ("pypy3", True), ("/bin/bash", False), ("pythonista", False)],
)
def test_interpreters_are_told_by_their_names(path: str, python: bool) -> None:  # noqa: FBT001 - a table
    """Shells and wrappers around a server are not its launcher."""
    assert cmdline.is_python(path) is python
