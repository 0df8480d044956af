"""A package index on this machine: real wheels of nearly nothing, behind a real HTTP server."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import threading
import time
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.wheels import TOPK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class LocalIndex:
    """A simple index of sglang wheels.

    Attributes:
        root: what is served.
        url: the index's address, once it is served.
        credentials: `user:password` that it demands; empty for none.
        status: what it answers to everything; 0 for the truth.
        wait_s: seconds for which it keeps a request waiting.
        asked: the paths that were asked for.
    """

    root: Path
    url: str = ""
    credentials: str = ""
    status: int = 0
    wait_s: float = 0.0
    asked: list[str] = field(default_factory=list)

    def add(self, version: str, topk: bytes) -> None:
        """Have a release that holds one file."""
        folder = self.root / "simple" / "sglang"
        folder.mkdir(parents=True, exist_ok=True)
        info = f"sglang-{version}.dist-info"
        with zipfile.ZipFile(folder / f"sglang-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(TOPK, topk)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        links = "".join(f'<a href="{one.name}">{one.name}</a>\n' for one in sorted(folder.glob("*.whl")))
        (folder / "index.html").write_text(f"<!DOCTYPE html>\n<html><body>{links}</body></html>\n", encoding="utf-8")

    def with_credentials(self) -> str:
        """The address as settings hold it when it demands credentials."""
        return self.url.replace("://", f"://{self.credentials}@")


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, index: LocalIndex, *words: Any) -> None:
        self.index = index
        super().__init__(*words, directory=str(index.root))

    def do_GET(self) -> None:
        self.index.asked.append(self.path)
        time.sleep(self.index.wait_s)
        wanted = "Basic " + base64.b64encode(self.index.credentials.encode()).decode()
        if self.index.status:
            self.send_error(self.index.status)
        elif self.index.credentials and self.headers.get("Authorization") != wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="index"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def local_index(root: Path) -> Iterator[LocalIndex]:
    """Serve an index, empty at first."""
    index = LocalIndex(root)
    (root / "simple").mkdir(parents=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, index)) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        index.url = f"http://127.0.0.1:{server.server_port}/simple"
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
