"""A server that answers /generate as sglang streams it, with counts that a test decides."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable


class GenerateServer:
    """Streams server-sent events on the loopback; use it as a context manager.

    Args:
        tokens: how many tokens the n-th request (from 0) gets, given how many it asked for.
        text: what the n-th request's tokens decode to; may be empty, as byte tokens of random prompts often are.
    """

    def __init__(self, tokens: Callable[[int, int], int], text: Callable[[int], str] = "word {}".format) -> None:
        self.requests: list[dict[str, Any]] = []
        lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(server.requests)
                    server.requests.append(body)
                count = tokens(number, int(body["sampling_params"]["max_new_tokens"]))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for done in range(1, count + 1):
                    meta = {"id": f"request-{number}", "completion_tokens": done, "prompt_tokens": 3}
                    event = json.dumps({"text": text(number), "meta_info": meta})
                    self.wfile.write(f"data: {event}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
