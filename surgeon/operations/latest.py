"""How far the installed sglang is from the newest one that the node could install, and whether the patch fits that."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from surgeon.errors import SurgeonError
from surgeon.registry import index as registry
from surgeon.registry import settings, wheels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from surgeon.node.client import Node
    from surgeon.operations.served import Served
    from surgeon.patches import Patch
    from surgeon.registry.index import Index
    from surgeon.surgery import Outcome as Located
    from surgeon.surgery.live_path import Verdict as LivePath

_TOPK = "sglang/srt/layers/moe/topk.py"
_TOPK_LIMIT = 4_000_000
_NODE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Latest:
    """The newest release.

    Attributes:
        index: where it was asked for, without credentials.
        whose: "the node's", "this machine's" or "the node's and this machine's": whose settings name that index.
        source: the variable or file that names it there; empty for pip's own default.
        installed: the version it is compared with.
        version: the newest one.
        behind: how many releases are newer than the installed one; None if that is a development build.
        located: where the patch would go in it.
        names: what the patch would be passed there; empty if it does not fit.
        misfit: why the patch does not fit; empty if it does.
        live: whether the served model would take it there; None if nothing is known to be served.
        warnings: what went wrong on the way.
    """

    index: str
    whose: str
    source: str
    installed: str
    version: str
    behind: int | None
    located: Located
    names: tuple[str, ...]
    misfit: str
    live: LivePath | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotKnown:
    """No index could be asked.

    Attributes:
        why: each attempt and what came of it.
    """

    why: tuple[str, ...]


def check(
    installed: str,
    patch: Patch,
    served: Served | None,
    node: Node | None = None,
    python: str = "",
    pid: int | None = None,
) -> Latest | NotKnown:
    """Ask for the newest release, and try the patch on it in memory.

    The index that the node uses is asked from this machine: one more round trip tells its address, and what of it is
    secret stays on the node. Where it cannot be asked from here, this machine's own index is.

    Args:
        installed: the version on the node.
        patch: what is tried.
        served: what is served; it is judged as if launched anew there.
        node: a connected node; None if there is none.
        python: the node's interpreter that has sglang.
        pid: the server, whose environment counts.
    """
    tried: list[str] = []
    for index, whose in _indexes(node, python, pid, tried):
        try:
            return _on(index, whose, installed, patch, served, tried)
        except registry.RegistryError as error:
            tried.append(f"{whose} index {error.message}" if index.shown in error.message else error.message)
    return NotKnown(tuple(tried))


def _indexes(node: Node | None, python: str, pid: int | None, tried: list[str]) -> Iterator[tuple[Index, str]]:
    """What to ask, in turn, and whose settings name it."""
    asked = ""
    if node is not None:
        try:
            index = _of_node(node, python, pid)
        except SurgeonError as error:
            tried.append(error.message)
        else:
            asked = index.shown
            yield index, "the node's and this machine's" if index.own else "the node's"
    try:
        mine = registry.own()
    except registry.RegistryError as error:
        tried.append(error.message)
        return
    if mine.shown != asked:
        yield mine, "this machine's"


def _of_node(node: Node, python: str, pid: int | None) -> Index:
    """The index that the node's settings name, as its server's interpreter sees them."""
    args = {"code": Path(settings.__file__).read_text("utf-8"), "python": python, "timeout_s": _NODE_TIMEOUT_S}
    answer = node.call("run", {**args, "pid": pid} if pid is not None else args, deadline_s=_NODE_TIMEOUT_S + 10)
    lines = [line for line in str(answer["stdout"]).splitlines() if line.startswith(settings.MARK)]
    if not lines:
        last = str(answer["stderr"]).strip().splitlines()[-1:] or ["nothing"]
        raise registry.RegistryError(f"the node's {python} could not say which index it uses; it said: {last[0]}")
    said = json.loads(lines[-1].removeprefix(settings.MARK))
    return registry.named(str(said["url"]), str(said["source"]))


def _on(index: Index, whose: str, installed: str, patch: Patch, served: Served | None, tried: list[str]) -> Latest:
    from surgeon import surgery
    from surgeon.operations import grafts

    known = registry.releases(index)
    version = str(known[0])
    source = _read(wheels.fetch_from(index, version), index)
    names: tuple[str, ...] = ()
    misfit = ""
    try:
        names = grafts.cut(source, patch, f"sglang {version}")[1].spec.wants
    except SurgeonError as error:
        misfit = error.message
    return Latest(
        index=index.shown,
        whose=whose,
        source=index.source,
        installed=installed,
        version=version,
        behind=_behind(installed, known),
        located=surgery.locate(source),
        names=names,
        misfit=misfit,
        live=served.anew().live(version) if served and not misfit else None,
        warnings=tuple(tried),
    )


def _read(wheel: Path, index: Index) -> bytes:
    """topk.py of a wheel that may come from anywhere."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(_TOPK).file_size <= _TOPK_LIMIT:
                return archive.read(_TOPK)
            why = f"its {_TOPK} is larger than {_TOPK_LIMIT} bytes"
    except KeyError:
        why = f"it has no {_TOPK}"
    except zipfile.BadZipFile as error:
        why = f"it is no wheel: {error}"
    raise registry.RegistryError(f"{wheel.name} of {index.shown} cannot be judged: {why}", where=index.shown)


def _behind(installed: str, known: Sequence[Version]) -> int | None:
    try:
        version = Version(installed)
    except InvalidVersion:
        return None
    # A main build calls itself 0.0.0.dev1+g...: it is no release, and not older than all of them.
    if version.is_devrelease and not any(version.release):
        return None
    return sum(one > version for one in known)
