"""Packs the agent into one file whose bytes depend on its sources alone, and the program that starts it."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

# The oldest date a zip can hold; a real one would change the hash from build to build.
_EPOCH = (1980, 1, 1, 0, 0, 0)

# Exit status of an interpreter that is too old; 2 is what one says that does not know an option.
TOO_OLD = 97

# Nothing but letters, digits and what no shell treats specially between single quotes: this goes through whatever
# login shell the user has on the node. The version is checked before anything that an old Python cannot parse.
_PROGRAM = (
    "import sys;sys.version_info<(3,8) and sys.exit({too_old});"
    'import base64,zlib;exec(zlib.decompress(base64.b64decode("{source}")));boot(*sys.argv[1:4])'
)

# Tries interpreters in turn until one is new enough. $1 to $4: the program, the agent's hash, the state directory,
# the nonce; then the interpreters.
SEEK = (
    "b=$1; h=$2; s=$3; n=$4; shift 4; "
    'for p in "$@"; do '
    'command -v "$p" >/dev/null 2>&1 || continue; '
    '"$p" -I -S -B -X utf8 -c "$b" "$h" "$s" "$n"; r=$?; '
    f"case $r in 2|{TOO_OLD}|126|127) ;; *) exit $r;; esac; "
    "done; echo surgeon: no python >&2; exit 127"
)


@dataclass(frozen=True)
class Bundle:
    """The agent, packed.

    Attributes:
        data: a zip that Python can import from.
        sha256: its hash, which is its name on the node.
        program: what ``python3 -c`` runs to check and start it there.
    """

    data: bytes
    sha256: str
    program: str


@cache
def bundle() -> Bundle:
    """Pack the agent that is part of this installation of surgeon; once per process."""
    sources = {
        entry.name: entry.read_bytes()
        for entry in resources.files("surgeon.node.agent").iterdir()
        if entry.name.endswith(".py")
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in sorted(sources):
            info = zipfile.ZipInfo(f"surgeon_agent/{name}", _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = 0o600 << 16
            archive.writestr(info, sources[name])
    data = packed.getvalue()
    source = base64.b64encode(zlib.compress(sources["boot.py"], 9)).decode("ascii")
    program = _PROGRAM.format(too_old=TOO_OLD, source=source)
    return Bundle(data, hashlib.sha256(data).hexdigest(), program)


def command(interpreters: tuple[str, ...], state_dir: str | None, nonce: str) -> list[str]:
    """Return the command that starts the agent on a node.

    Args:
        interpreters: which to try, in order.
        state_dir: the state directory; None for the usual places.
        nonce: a word that the answer will repeat.
    """
    packed = bundle()
    return ["/bin/sh", "-c", SEEK, "sh", packed.program, packed.sha256, state_dir or "", nonce, *interpreters]
