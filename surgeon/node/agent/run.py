"""Runs a program, or a piece of Python, where and as the server runs."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Set

from . import children, identity, masking, processes
from .protocol import AgentError, Context, verb

OUTPUT_LIMIT = 1 << 20
DEFAULT_TIMEOUT_S = 60.0

# A word of ``argv`` that stands for the server's interpreter.
PYTHON_WORD = "{python}"


def _bounded(data: bytes, secrets: Set[str]) -> str:
    """Return the last mebibyte of an output: what went wrong stands at its end."""
    cut = len(data) - OUTPUT_LIMIT
    text = data[-OUTPUT_LIMIT:].decode("utf-8", "replace")
    return masking.text("[{} bytes left out]\n{}".format(cut, text) if cut > 0 else text, secrets)


def _command(args: Dict[str, Any], python: Optional[str], options: List[str]) -> List[str]:
    words = [str(word) for word in args.get("argv") or ()]
    needs_python = "code" in args or PYTHON_WORD in words
    if needs_python and python is None:
        raise AgentError(
            "usage",
            "Expected a server's pid or an interpreter to run Python code with; found neither.",
            "Name the interpreter with python.",
        )
    if args.get("code") is not None:
        return [str(python), *options, "-c", str(args["code"]), *words]
    if not words:
        raise AgentError("usage", "Expected argv or code to run; found neither.")
    return [str(python) if word == PYTHON_WORD else word for word in words]


@verb("run")
def run(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Run a program to its end, in a session of its own that is killed at the timeout.

    With ``pid``, it runs as that server runs: its environment, working directory, interpreter (with its options) and
    user. Bytecode is not written, unless ``env_extra`` says so.

    Args:
        args: ``code`` for Python with ``argv`` as its arguments, else ``argv``, where ``{python}`` stands for the
            interpreter; ``pid`` of a server; ``python``, ``cwd`` to use instead of the server's; ``env_extra``;
            ``stdin`` text; ``timeout_s`` (60 unless said).
        context: its deadline cuts the timeout short.

    Returns:
        ``returncode`` (negative for a signal), ``timed_out``, ``stdout`` and ``stderr`` (the last MiB of each,
        secrets masked), ``seconds``.
    """
    environ = dict(os.environ)
    python, cwd = args.get("python"), args.get("cwd")
    server = processes.of_pid(int(args["pid"])) if args.get("pid") is not None else None
    options: List[str] = []
    if server is not None:
        if server.environ is None:
            raise AgentError(
                "does-not-fit",
                "The environment of the server (pid {}) cannot be read.".format(server.process.pid),
                "Work as the user who started it, or as root.",
            )
        environ = dict(server.environ)
        python = python or server.interpreter
        cwd = cwd or server.cwd
        options = [one for one in server.program.options if one != "-i"] if server.program is not None else []
    secrets = masking.secrets(server.process.argv if server is not None else (), environ)
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    environ.update({str(name): str(value) for name, value in (args.get("env_extra") or {}).items()})
    argv = _command(args, str(python) if python else None, options)
    if server is not None:
        argv = identity.as_owner(argv, server.process.pid, server.process.uid)
    ended = children.run(
        context,
        argv,
        stdin=str(args.get("stdin") or "").encode("utf-8"),
        env=environ,
        cwd=str(cwd) if cwd else None,
        timeout_s=float(args.get("timeout_s") or DEFAULT_TIMEOUT_S),
    )
    return {
        "returncode": -9 if ended.returncode is None else ended.returncode,
        "timed_out": ended.returncode is None,
        "stdout": _bounded(ended.stdout, secrets),
        "stderr": _bounded(ended.stderr, secrets),
        "seconds": round(ended.seconds, 3),
    }
