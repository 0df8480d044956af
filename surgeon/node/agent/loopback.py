"""Talks to a server of this node over the loopback interface: never through a proxy, with the key it was given."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any, Dict, List, Optional, Tuple, Union

from . import cmdline, masking, processes, procfs
from .protocol import AgentError, Context, verb

BODY_LIMIT = 4 * 1024 * 1024
DEFAULT_TIMEOUT_S = 30.0

_ANY = {"0.0.0.0", "127.0.0.1", "::", "::1", "::ffff:127.0.0.1"}  # noqa: S104 - addresses that loopback reaches


class Endpoint:
    """Where a server answers, and what it asks for.

    Attributes:
        host: the address to connect to: loopback, unless the server listens on one other address only.
        port: its port.
        key: its API key; None when it has none.
        tls: whether it was started with a certificate.
        secrets: values that must not leave the node in a reply.
    """

    def __init__(self, port: int, server: Optional[processes.Server]) -> None:
        """Take what is known of the server that listens on ``port``, if any of sglang's does."""
        self.port = port
        self.key = server.api_key if server is not None else None
        self.tls = server is not None and cmdline.option(server.args, "--ssl-certfile") is not None
        self.secrets = server.secrets() if server is not None else set()
        addresses = [one.address for one in procfs.listeners(port)]
        if not addresses or any(one in _ANY for one in addresses):
            self.host = "::1" if addresses and set(addresses) <= {"::1"} else "127.0.0.1"
        else:
            self.host = addresses[0]

    def request(self, method: str, path: str, body: Any, timeout_s: float) -> Dict[str, Any]:
        """Send one request and read its answer.

        Returns:
            ``status`` and ``body`` (text, at most 4 MiB), or None and ``error``; ``seconds`` until the last byte.
        """
        began = time.monotonic()
        answer: Dict[str, Any] = {"status": None, "body": None, "error": None}
        connection = self._connect(timeout_s)
        late = threading.Event()
        watchdog: Optional[threading.Timer] = None
        try:
            connection.connect()
            # A socket's timeout starts again with every byte; this ends a reply that trickles.
            watchdog = threading.Timer(began + timeout_s - time.monotonic(), self._cut, [connection.sock, late])
            watchdog.daemon = True
            watchdog.start()
            status, data = self._exchange(connection, method, path, body)
            answer.update(status=status, body=masking.text(data.decode("utf-8", "replace"), self.secrets))
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer["error"] = "{}: {}".format(type(error).__name__, error)
        finally:
            if watchdog is not None:
                watchdog.cancel()
            connection.close()
        if late.is_set() or (answer["error"] is not None and time.monotonic() - began >= timeout_s):
            answer = {"status": None, "body": None, "error": "no answer within {:.1f} s".format(timeout_s)}
        answer["seconds"] = round(time.monotonic() - began, 4)
        return answer

    def _exchange(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> Tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            headers["Authorization"] = "Bearer " + self.key
        connection.request(method, path, None if body is None else json.dumps(body).encode("utf-8"), headers)
        response = connection.getresponse()
        return response.status, response.read(BODY_LIMIT)

    def _connect(self, timeout_s: float) -> Union[http.client.HTTPConnection, http.client.HTTPSConnection]:
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        import ssl

        # The certificate names the public host, and loopback needs no proof of who answers: the listener is checked.
        context = ssl._create_unverified_context()  # noqa: S323, SLF001 - loopback only
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)

    @staticmethod
    def _cut(held: socket.socket, late: threading.Event) -> None:
        late.set()
        with contextlib.suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)


def _endpoint(port: int, pid: Optional[int]) -> Endpoint:
    """Return the endpoint on a port, of that very server where a pid is given.

    Raises:
        AgentError: that server does not run, or it is another process that listens on the port (``failed``).
    """
    if pid is None:
        known = processes.find()[0]
        return Endpoint(port, next((one for one in known if one.port == port), None))
    server = processes.of_pid(pid)
    if server.port != port or not server.listening:
        stranger = processes.stranger_on(port) or "nobody"
        raise AgentError(
            "failed",
            "Expected the server with pid {} to listen on port {}; {} does.".format(pid, port, stranger),
            where="port {}".format(port),
        )
    return Endpoint(port, server)


@verb("http")
def http_(args: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Send requests to a server over loopback and return their answers, in the order of the requests.

    Args:
        args: ``port``; ``pid`` of the server that must be the one to answer, or None; ``requests``, each with
            ``method``, ``path``, ``json`` (or None), ``timeout_s`` and ``after_s``, how long to wait before it;
            ``parallel``, how many are in flight at once (1 unless said).
        context: its deadline cuts every timeout short.
    """
    target = _endpoint(int(args["port"]), int(args["pid"]) if args.get("pid") is not None else None)
    requests: List[Dict[str, Any]] = list(args["requests"])
    answers: List[Dict[str, Any]] = [{} for _ in requests]
    waiting = list(enumerate(requests))
    guard = threading.Lock()

    def work() -> None:
        while True:
            with guard:
                if not waiting:
                    return
                place, request = waiting.pop(0)
            # An endpoint's work may be to end what an earlier one began; it is called even when nobody waits any more.
            time.sleep(min(float(request.get("after_s") or 0.0), max(0.0, context.remaining() - 1.0)))
            limit = min(float(request.get("timeout_s") or DEFAULT_TIMEOUT_S), max(0.1, context.remaining() - 0.5))
            method = str(request.get("method") or "GET")
            answers[place] = target.request(method, str(request["path"]), request.get("json"), limit)

    count = max(1, min(int(args.get("parallel") or 1), len(requests)))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"responses": answers}
