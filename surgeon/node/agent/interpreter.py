"""Finds the Python that a server runs under, and asks it where its code comes from.

The question is put to that very interpreter, with the server's environment and working directory; sglang itself is
never imported.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from . import children, cmdline, procfs

if TYPE_CHECKING:
    from .protocol import Context

# Answers with one marked line, because a site's start-up files may print too. Any Python 3 runs it.
MARK = "surgeon-probe:"
_PROBE = """
import json, os, sys
asked = json.loads(sys.argv[1])
if asked["script"] and sys.path and sys.path[0] == "":
    sys.path[0] = os.path.dirname(os.path.realpath(asked["script"]))
path = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
found = {"origin": None, "locations": [], "error": None}
try:
    from importlib.util import find_spec
    spec = find_spec("sglang")
    if spec is not None:
        found["origin"] = spec.origin if spec.has_location else None
        found["locations"] = [os.path.abspath(one) for one in spec.submodule_search_locations or []]
except Exception as error:  # noqa: BLE001 - an interpreter that does not start is a finding
    found["error"] = "%s: %s" % (type(error).__name__, error)
site = sys.modules.get("site")
print("\\n" + asked["mark"] + json.dumps({
    "version": ".".join(str(part) for part in sys.version_info[:3]), "executable": sys.executable,
    "prefix": sys.prefix, "cache_tag": getattr(sys.implementation, "cache_tag", None), "sys_path": path,
    "user_site": site.getusersitepackages() if site and site.ENABLE_USER_SITE else None, "sglang": found}))
"""

PROBE_TIMEOUT_S = 10.0

# Where images and people put environments; ~ is the user's home.
_PLACES = (
    "/opt/venv",
    "/opt/*venv*",
    "/venv",
    "/sgl-workspace/venv",
    "/sgl-workspace/*/.venv",
    "/opt/conda",
    "/opt/conda/envs/*",
    "/workspace/.venv",
    "/workspace/venv",
    "~/.venv",
    "~/venv",
    "~/.venvs/*",
    "~/venvs/*",
    "~/*/.venv",
    "~/miniconda3",
    "~/miniconda3/envs/*",
    "~/miniforge3",
    "~/miniforge3/envs/*",
    "~/anaconda3/envs/*",
)


class Interpreter(NamedTuple):
    """One interpreter's answer.

    Attributes:
        path: the interpreter, as a path that keeps its virtual environment.
        source: ``server``, ``option`` or ``path``.
        version: of Python.
        sys_path: absolute folders, in import order.
        cache_tag: as in ``topk.cpython-311.pyc``.
        user_site: the user's own site-packages when it takes part in imports.
        origin: the file of the top-level sglang package; None when it has none (a bare folder).
        locations: the folders of that package.
        error: why it could not be asked, or why looking for sglang failed; None when all went well.
    """

    path: str
    source: str
    version: str = ""
    sys_path: Tuple[str, ...] = ()
    cache_tag: str = ""
    user_site: Optional[str] = None
    origin: Optional[str] = None
    locations: Tuple[str, ...] = ()
    error: Optional[str] = None


def _on_path(name: str, environ: Dict[str, str], cwd: str) -> Iterator[str]:
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        candidate = os.path.join(cwd, folder, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            yield os.path.normpath(candidate)


def _mapped(pid: int) -> Iterator[str]:
    """Yield the Pythons whose site-packages a process has loaded libraries from."""
    seen = set()
    with contextlib.suppress(OSError), open("/proc/{}/maps".format(pid), encoding="utf-8", errors="replace") as maps:
        for line in maps:
            prefix, found, rest = line.partition("/lib/python")
            place = prefix.find("/")
            if found and place >= 0 and "-packages/" in rest and prefix[place:] not in seen:
                seen.add(prefix[place:])
                yield prefix[place:] + "/bin/python"


def _candidates(process: procfs.Process, environ: Dict[str, str], cwd: str) -> Iterator[str]:
    first = process.argv[0] if process.argv else ""
    if "/" in first:
        yield os.path.normpath(os.path.join(cwd, first))
    elif cmdline.is_python(first):
        for candidate in _on_path(first, environ, cwd):
            yield candidate
    for candidate in _mapped(process.pid):
        yield candidate
    if environ.get("VIRTUAL_ENV"):
        yield os.path.join(environ["VIRTUAL_ENV"], "bin", "python")
    for name in ("python", "python3"):
        for candidate in _on_path(name, environ, cwd):
            yield candidate


def resolve(process: procfs.Process, environ: Dict[str, str], cwd: Optional[str]) -> Optional[str]:
    """Return the interpreter a process was started with.

    /proc/PID/exe is the base interpreter where a virtual environment's python is a link to it: it only confirms that
    the path found by the process's own words, PATH and working directory is the right one.
    """
    exe = procfs.link(process.pid, "exe")
    if exe is None:
        return None
    real = os.path.realpath(procfs.undeleted(exe))
    for candidate in _candidates(process, environ, procfs.undeleted(cwd or "/")):
        if os.path.realpath(candidate) == real:
            return candidate
    return real if cmdline.is_python(real) else None


def probe(
    context: Context,
    path: str,
    source: str,
    *,
    environ: Optional[Dict[str, str]] = None,
    cwd: Optional[str] = None,
    program: Optional[cmdline.Program] = None,
    prefix: Sequence[str] = (),
) -> Interpreter:
    """Ask an interpreter for its version, its import path and where it would import sglang from.

    Args:
        context: the verb's context.
        path: the interpreter.
        source: how it was found, carried into the answer.
        environ: the environment to ask in; None hands on the agent's.
        cwd: the working directory to ask in.
        program: what the server runs, for its interpreter options and its script's folder.
        prefix: words before the interpreter, to ask as another user.
    """
    script = program.target if program is not None and program.kind == "script" else ""
    options = program.options if program is not None else ()
    question = json.dumps({"mark": MARK, "script": os.path.join(cwd or "/", script) if script else ""})
    variables = dict(os.environ if environ is None else environ)
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    variables.pop("PYTHONINSPECT", None)
    if "-i" in options:
        options = tuple(one for one in options if one != "-i")
    try:
        ended = children.run(
            context,
            [*prefix, path, *options, "-c", _PROBE, question],
            env=variables,
            cwd=cwd if cwd and os.path.isdir(cwd) else None,
            timeout_s=PROBE_TIMEOUT_S,
        )
    except Exception as error:  # noqa: BLE001 - an interpreter that does not start is a finding
        return Interpreter(path, source, error=str(error))
    line = [one for one in ended.stdout.decode("utf-8", "replace").splitlines() if one.startswith(MARK)]
    if not line:
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        reason = "took longer than {:.0f} s".format(ended.seconds) if ended.returncode is None else "".join(said)
        return Interpreter(path, source, error=reason or "it gave no answer (exit {})".format(ended.returncode))
    answer: Dict[str, Any] = json.loads(line[-1][len(MARK) :])
    return Interpreter(
        path=path,
        source=source,
        version=answer["version"],
        sys_path=tuple(answer["sys_path"]),
        cache_tag=answer["cache_tag"] or "",
        user_site=answer["user_site"],
        origin=answer["sglang"]["origin"],
        locations=tuple(answer["sglang"]["locations"]),
        error=answer["sglang"]["error"],
    )


def _has_sglang(prefix: str) -> bool:
    return bool(
        glob.glob(os.path.join(glob.escape(prefix), "lib", "python3*", "*-packages", "sglang"))
        or glob.glob(os.path.join(glob.escape(prefix), "lib", "python3*", "*-packages", "sglang-*-info"))
    )


def known_places(environ: Dict[str, str]) -> List[str]:
    """Return the interpreters worth asking when no server runs: those on PATH, and environments that hold sglang."""
    home = environ.get("HOME") or os.path.expanduser("~")
    found = []
    for name in ("python3", "python"):
        found += list(_on_path(name, environ, "/"))[:1]
    prefixes = [environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    for place in _PLACES:
        prefixes += sorted(glob.glob(place.replace("~", glob.escape(home), 1)))
    found += [os.path.join(one, "bin", "python") for one in prefixes if one and _has_sglang(one)]
    seen = set()
    unique = []
    for path in found:
        # Two virtual environments may share a base interpreter; the folder tells them apart.
        key = (os.path.realpath(os.path.dirname(path)), os.path.realpath(path))
        if key not in seen and os.access(path, os.X_OK):
            seen.add(key)
            unique.append(path)
    return unique
