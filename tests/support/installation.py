"""A small installed package to operate on, and the agent's verbs called in this process."""

from __future__ import annotations

import base64
import hashlib
import os
import py_compile
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.node.agent.__main__ import perform
from surgeon.node.agent.protocol import Context
from surgeon.node.agent.state import site_id

ORIGINAL = b"# caf\xc3\xa9\r\ndef topk():\r\n    return 'original'\r\n"
PATCHED = ORIGINAL.replace(b"original", b"patched!")
RUNTIME = b"active = True\n"


def sha(data: bytes) -> str:
    """Return the sha256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


@dataclass
class Installation:
    """A package ``moe`` in a site-packages folder, hard-linked into a cache as uv does it.

    Attributes:
        root: holds everything.
        context: what verbs get.
    """

    root: Path
    context: Context

    @classmethod
    def make(cls, root: Path) -> Installation:
        """Make the package, its link in the cache, and bytecode of three kinds."""
        state = root / "state"
        state.mkdir(mode=0o700)
        found = cls(root, Context(str(state), None, time.monotonic() + 60))
        found.package.mkdir(parents=True)
        (found.package / "__init__.py").write_bytes(b"")
        found.topk.write_bytes(ORIGINAL)
        found.topk.chmod(0o640)
        old = time.time() - 1000
        os.utime(found.topk, (old, old))
        os.link(found.topk, found.cached)
        found.bytecode()
        return found

    @property
    def package(self) -> Path:
        """The folder of the package."""
        return self.root / "site-packages" / "moe"

    @property
    def topk(self) -> Path:
        """The module that is patched."""
        return self.package / "topk.py"

    @property
    def runtime(self) -> Path:
        """The module that is added."""
        return self.package / "_runtime.py"

    @property
    def cached(self) -> Path:
        """Another environment's name of the same file."""
        return self.root / "cached_topk.py"

    @property
    def site(self) -> str:
        """The short name of the site-packages folder."""
        return site_id(str(self.package.parent))

    @property
    def folder(self) -> Path:
        """Where the site's ledger is."""
        return Path(self.context.state, self.site)

    def bytecode(self) -> list[Path]:
        """Compile the module as interpreters leave it: unoptimised, optimised, and never checked against its source."""
        cache = self.package / "__pycache__"
        cache.mkdir(exist_ok=True)
        paths = [cache / f"topk.cpython-3{minor}.pyc" for minor in ("10", "11.opt-1", "12")]
        modes = [py_compile.PycInvalidationMode.TIMESTAMP] * 2 + [py_compile.PycInvalidationMode.UNCHECKED_HASH]
        for path, mode in zip(paths, modes, strict=True):
            py_compile.compile(str(self.topk), str(path), invalidation_mode=mode, doraise=True)
        (cache / "topk_other.cpython-311.pyc").write_bytes(b"of another module")
        return paths

    def call(self, verb: str, **args: Any) -> dict[str, Any]:
        """Have the agent's code carry out a verb, here."""
        self.context.deadline = time.monotonic() + 60
        return perform(verb, {"site_id": self.site, **args}, self.context)

    def acquire(self, **args: Any) -> str:
        """Take the lease and keep it for further calls."""
        lease = self.call("lease", action="acquire", **{"owner": "me", "host": "here", "pid": 1, "ttl_s": 60, **args})
        self.context.lease = lease["token"]
        return str(lease["token"])

    def commit_args(self) -> dict[str, Any]:
        """Ask for the runtime to be added and the module to be patched, in this order."""
        new = {"path": str(self.runtime), "b64": base64.b64encode(RUNTIME).decode(), "expect": None}
        changed = {"path": str(self.topk), "b64": base64.b64encode(PATCHED).decode(), "expect": sha(ORIGINAL)}
        return {
            "record": {"kind": "apply", "patch": "oea"},
            "files": [{**new, "like": str(self.topk)}, {**changed, "like": str(self.topk)}],
            "interpreter": sys.executable,
        }

    def commit(self) -> dict[str, Any]:
        """Patch."""
        return self.call("commit", **self.commit_args())

    def restore(self, revision: int = 1) -> dict[str, Any]:
        """Undo what ``commit`` did."""
        files = [
            {"path": str(self.topk), "present": [sha(PATCHED), sha(ORIGINAL)], "restore": sha(ORIGINAL)},
            {"path": str(self.runtime), "present": [sha(RUNTIME), None], "restore": None},
        ]
        record = {"kind": "rollback", "of": revision}
        return self.call("restore", record=record, files=files, interpreter=sys.executable)

    def records(self) -> list[dict[str, Any]]:
        """Return the ledger's records."""
        return list(self.call("ledger")["records"])

    def names(self) -> set[str]:
        """Return the names in the package's folder."""
        return {path.name for path in self.package.iterdir()}

    def imported(self) -> str:
        """Let a fresh interpreter import the module, bytecode and all, and say what it does."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        code = "from moe.topk import topk; print(topk())"
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, cwd=self.package.parent, env=environment
        )
        return done.stdout.decode().strip()

    def is_original(self) -> bool:
        """Whether every file is as the installer left it, with nothing beside."""
        status = self.topk.stat()
        return (
            self.topk.read_bytes() == ORIGINAL
            and status.st_mode & 0o7777 == 0o640
            and self.names() <= {"__init__.py", "topk.py", "__pycache__"}
        )
