"""Looks at a node once: servers, interpreter, installed sglang, packages, GPUs, model, ledger, beacons."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import beacons, documents, identity, installed, interpreter, launches, ledger, machine, packages, processes
from .cmdline import option
from .interpreter import Interpreter
from .protocol import AgentError, Context, verb

if TYPE_CHECKING:
    from .processes import Server

SERVER_INFO_TIMEOUT_S = 2.0

# Of sglang's some 400 arguments, those that decide what is served, by whom, and how experts are chosen.
_INFO = (
    "version",
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "context_length",
    "device",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "attention_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "fp4_gemm_runner_backend",
    "tp_size",
    "ep_size",
    "dp_size",
    "pp_size",
    "nnodes",
    "node_rank",
    "enable_dp_attention",
    "enable_eplb",
    "enable_two_batch_overlap",
    "enable_single_batch_overlap",
    "enable_lora",
    "enable_torch_compile",
    "disable_shared_experts_fusion",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "disable_cuda_graph",
    "cuda_graph_bs",
    "cuda_graph_max_bs",
    "disable_overlap_schedule",
    "max_running_requests",
    "max_total_num_tokens",
    "mem_fraction_static",
    "expert_distribution_recorder_mode",
    "init_expert_location",
    "ep_num_redundant_experts",
    "kt_method",
)


class _Look(NamedTuple):
    """What the survey found out about interpreters.

    Attributes:
        chosen: the interpreter that counts; None when nothing says which.
        installations: every sglang that was found.
        dists: what is installed on the chosen interpreter's path.
        problems: what is odd about it.
    """

    chosen: Optional[Interpreter]
    installations: List[packages.Installation]
    dists: List[Dict[str, Any]]
    problems: List[Dict[str, str]]


def _together(tasks: Dict[str, Callable[[], Any]]) -> Dict[str, Any]:
    """Run independent slow looks at the same time; one that fails answers with its exception."""
    answers: Dict[str, Any] = {}

    def work(name: str, task: Callable[[], Any]) -> None:
        try:
            answers[name] = task()
        except Exception as error:  # noqa: BLE001 - told as a problem, the other looks still count
            answers[name] = error

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in tasks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _problem(code: str, message: str, advice: str = "", where: str = "") -> Dict[str, str]:
    return {"code": code, "message": message, "advice": advice, "where": where}


def choose(servers: List[Server], port: Optional[int], pid: Optional[int]) -> Optional[Server]:
    """Return the server that is meant: by pid, by port, or the only one."""
    if pid is not None:
        servers = [one for one in servers if one.process.pid == pid]
    if port is not None:
        servers = [one for one in servers if one.port == port]
    return servers[0] if len(servers) == 1 else None


def _ask(context: Context, server: Optional[Server], servers: List[Server], python: Optional[str]) -> List[Interpreter]:
    """Ask the interpreters that may count: the server's, else the one named, else those at known places."""
    if server is not None and server.interpreter is not None and python is None:
        return [
            interpreter.probe(
                context,
                server.interpreter,
                "server",
                environ=server.environ,
                cwd=server.cwd,
                program=server.program,
                prefix=identity.as_owner([], server.process.pid, server.process.uid),
            )
        ]
    if python is not None:
        # The server's own environment decides what this interpreter imports, when it is the server's.
        if server is not None and server.interpreter is not None and _same(python, server.interpreter):
            asked = _ask(context, server, servers, None)
            return [one._replace(source="option") for one in asked]
        return [interpreter.probe(context, os.path.expanduser(python), "option")]
    if servers:
        return []
    places = interpreter.known_places(dict(os.environ))
    answers = _together({path: _prober(context, path) for path in places})
    return [answers[path] for path in places if isinstance(answers[path], Interpreter)]


def _prober(context: Context, path: str) -> Callable[[], Interpreter]:
    return lambda: interpreter.probe(context, path, "path")


def _same(one: str, other: str) -> bool:
    def key(path: str) -> Tuple[str, str]:
        return os.path.realpath(os.path.dirname(path)), os.path.realpath(path)

    return key(os.path.expanduser(one)) == key(other)


def _judge(asked: List[Interpreter]) -> _Look:
    """Find every installation of the interpreters that were asked, and the interpreter that counts."""
    found: List[packages.Installation] = []
    lists: Dict[str, List[Dict[str, Any]]] = {}
    problems = []
    for one in asked:
        lists[one.path] = packages.distributions(one.sys_path)
        places = packages.installations(one.path, one.sys_path, one.locations, lists[one.path])
        found += [place for place in places if place not in found]
        problems += _oddities(one, places)
    having = [one for one in asked if one.locations]
    folders = {os.path.realpath(one.locations[0]) for one in having}
    if len(folders) == 1:
        chosen: Optional[Interpreter] = having[0]
    else:
        # An interpreter that was named, or that runs the server, counts even when it finds no sglang.
        chosen = asked[0] if len(asked) == 1 and asked[0].source != "path" else None
    return _Look(chosen, found, lists[chosen.path] if chosen is not None else [], problems)


def _oddities(asked: Interpreter, places: List[packages.Installation]) -> List[Dict[str, str]]:
    problems = []
    if asked.error is not None and asked.source != "path":
        problems.append(
            _problem(
                "interpreter",
                "Expected {} to say where sglang is; it said: {}".format(asked.path, asked.error),
                "Run it by hand with the server's environment.",
                asked.path,
            )
        )
    bare = [one.package_dir for one in places if not one.regular]
    if bare:
        problems.append(
            _problem(
                "ghost-namespace",
                "{} is a folder named sglang without __init__.py; Python may take it for the package.".format(bare[0]),
                "If it is what an uninstalled sglang left behind, remove it.",
                bare[0],
            )
        )
    dists = [one.dist_info for one in places if one.dist_info is not None]
    regular = sorted({one.package_dir for one in places if one.regular})
    if len(set(dists)) > 1 or len(regular) > 1:
        problems.append(
            _problem(
                "two-installations",
                "Expected one sglang for {}; found {}.".format(asked.path, ", ".join([*regular, *sorted(set(dists))])),
                "Remove the one that is not meant; the first on the path is the one that runs.",
                asked.path,
            )
        )
    if asked.user_site and any(one.startswith(asked.user_site + os.sep) for one in regular):
        problems.append(
            _problem(
                "user-site",
                "sglang is imported from the user's own folder {}, which shadows the environment's.".format(
                    asked.user_site
                ),
                "Set PYTHONNOUSERSITE=1 for the launch if that is not meant.",
                asked.user_site,
            )
        )
    return problems


def server_info(server: Server) -> Optional[Dict[str, Any]]:
    """Ask a server for the arguments that it resolved, for at most two seconds; None when it does not say."""
    from . import loopback

    if not server.listening:
        return None
    target = loopback.Endpoint(server.port, server)
    until = time.monotonic() + SERVER_INFO_TIMEOUT_S
    # Releases from 0.5.6 on have the short name; the long one stays as an alias.
    for path in ("/server_info", "/get_server_info"):
        left = until - time.monotonic()
        answer = target.request("GET", path, None, left) if left > 0 else {"status": None, "body": ""}
        if answer["status"] == 200:  # noqa: PLR2004 - HTTP OK
            try:
                said = json.loads(str(answer["body"]))
            except ValueError:
                return None
            return {name: said[name] for name in _INFO if name in said} if isinstance(said, dict) else None
        if answer["status"] is None:
            return None
    return None


def _node(state: str, server: Optional[Server]) -> Dict[str, Any]:
    uid = server.process.uid if server is not None else None
    home = processes.home(uid if uid is not None else os.geteuid())
    return {
        "hostname": socket.gethostname(),
        "platform": "{}-{}-{}".format(os.uname().sysname, os.uname().release, os.uname().machine),
        "machine": os.uname().machine,
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "user": processes.user_name(os.geteuid()),
        "uid": os.geteuid(),
        "time": time.time(),
        "beacon_dir": beacons.folder_for(state, uid, home),
    }


def _model(server: Optional[Server], info: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    if server is None:
        return None
    name = option(server.args, "--model-path", "--model") or (info or {}).get("model_path")
    environ = server.environ or {}
    home = environ.get("HOME") or processes.home(server.process.uid)
    return machine.model(name, server.args, environ, server.cwd, home)


def _orphans(lost: List[Any]) -> List[Dict[str, str]]:
    return [
        _problem(
            "orphan-worker",
            "{} (pid {}) belongs to no running server, and may still hold GPU memory.".format(
                one.argv[0] if one.argv else one.title, one.pid
            ),
            "If no server of yours is meant to own it, end it: kill {}".format(one.pid),
            "pid {}".format(one.pid),
        )
        for one in lost
    ]


@verb("survey")
def survey(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Answer all that inspecting, verifying and planning need, in one call. Nothing is changed.

    Args:
        args: ``python``, ``port`` and ``pid`` of what is meant (each may be None); ``module``: the name of the
            runtime beside topk.py; ``parts``: those of further modules; ``http``: whether to ask the server, for at
            most 2 s.
        context: holds the state directory.

    Returns:
        See contracts.md; what is missing is None or an empty list, and ``problems`` tells what is odd.
    """
    servers, lost = processes.find()
    server = choose(servers, args.get("port"), args.get("pid"))
    tasks: Dict[str, Callable[[], Any]] = {
        "asked": lambda: _ask(context, server, servers, args.get("python")),
        "gpus": lambda: machine.gpus(context),
    }
    if server is not None and args.get("http"):
        tasks["server_info"] = lambda: server_info(server)
    answers = _together(tasks)
    if isinstance(answers["asked"], Exception):
        raise answers["asked"]
    look = _judge(answers["asked"])
    info = answers.get("server_info")
    info = info if isinstance(info, dict) else None
    chosen = look.chosen
    package = installed.package(chosen, look.installations) if chosen is not None else None
    module, parts = str(args.get("module") or "_surgeon_oea"), [str(part) for part in args.get("parts") or ()]
    beside = installed.beside(package["dir"], module, parts) if package else {}
    settings = (beside.get("settings") or {}).get("text")
    node = _node(context.state, server)
    kept: Dict[str, Any] = {"records": [], "lease": None, "torn": []}
    problems = look.problems + _orphans(lost)
    if package is not None:
        try:
            kept = ledger.read_site(context.state, package["site_id"])
        except AgentError as error:
            problems.append(_problem(error.code, error.message, error.advice, error.where))
    launch = launches.of_port(context.state, server.port if server is not None else args.get("port"))
    return {
        "node": node,
        "state_dir": context.state,
        "servers": [processes.describe(one) for one in servers],
        "chosen": server.process.pid if server is not None else None,
        "interpreter": {
            "path": chosen.path,
            "version": chosen.version,
            "source": chosen.source,
            "sys_path": list(chosen.sys_path),
            "cache_tag": chosen.cache_tag,
        }
        if chosen is not None
        else None,
        "installations": [dict(one._asdict()) for one in look.installations],
        "package": package,
        "topk": installed.target(package["dir"], package["dist_info"]) if package else None,
        "runner": installed.target(package["dir"], package["dist_info"], installed.RUNNER) if package else None,
        "beside": beside or {"runtime": None, "settings": None},
        "present": installed.present(kept["records"]),
        "packages": look.dists,
        "gpus": answers["gpus"] if isinstance(answers["gpus"], list) else [],
        "model": _model(server, info),
        "server_info": info,
        "ledger": kept,
        "documents": documents.read_all(context.state, package["site_id"]) if package else {},
        "beacons": beacons.collect([node["beacon_dir"], beacons.configured(settings)]),
        "launch": launches.summary(launch) if launch is not None else None,
        "problems": problems,
    }
