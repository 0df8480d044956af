"""HTTP to the lab's server on loopback."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from surgeon.errors import SurgeonError

_VOCABULARY = 512  # of the lab's model

# A proxy meant for the world outside must not see requests to this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Completion:
    """What the server answered to one request.

    Attributes:
        tokens: completion tokens by the server's own count.
        text: the decoded completion.
    """

    tokens: int
    text: str


def status(port: int, path: str, *, timeout_s: float = 5.0) -> int | None:
    """The HTTP status of a GET.

    Args:
        port: the server's.
        path: begins with a slash.
        timeout_s: seconds to wait for the answer.

    Returns:
        The status, or None if nothing answers there in time.
    """
    try:
        with _opener.open(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def post(port: int, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = 120.0) -> bytes:
    """POST JSON to the server.

    Args:
        port: the server's.
        path: begins with a slash.
        body: the JSON object to send; None sends an empty body.
        timeout_s: seconds to wait for the answer.

    Returns:
        The body of the answer.

    Raises:
        SurgeonError: no answer, or one that is not a success.
    """
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=b"" if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise SurgeonError(
            f"The lab's server answered {error.code} to POST {path}: {error.read(500).decode(errors='replace')}",
            advice="`surgeon lab logs` shows what the server says.",
            where=f"127.0.0.1:{port}",
        ) from error
    except OSError as error:
        raise SurgeonError(
            f"The lab's server did not answer POST {path}: {error}",
            advice="`surgeon lab status` says whether it runs.",
            where=f"127.0.0.1:{port}",
        ) from error


def generate(
    port: int,
    n: int,
    *,
    input_len: int = 64,
    max_new_tokens: int = 32,
    seed: int = 0,
    temperature: float = 0.0,
    timeout_s: float = 300.0,
) -> list[Completion]:
    """Have n greedy requests with random prompts in flight together, all of which run to their full length.

    They are sent as one batch, which the server takes apart: n connections on a busy machine arrive so far apart
    that the first are done before the last begin.

    Args:
        port: the server's.
        n: requests in flight together.
        input_len: prompt tokens of each.
        max_new_tokens: completion tokens of each.
        seed: of the prompts; another seed gives prompts that no cache has seen.
        temperature: 0 is greedy, where a random model soon repeats itself and rows of a batch resemble each other;
            1 keeps the rows of a batch independent, which formulas of T assume.
        timeout_s: seconds for all of them.

    Returns:
        The completions, in the order of the prompts.

    Raises:
        SurgeonError: the server refused, or did not answer in time.
    """
    numbers = random.Random(seed)  # noqa: S311 - prompts, not secrets
    prompts = [[numbers.randrange(_VOCABULARY) for _ in range(input_len)] for _ in range(n)]
    parameters = {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": parameters}
    answers = json.loads(post(port, "/generate", body, timeout_s=timeout_s))
    return [
        Completion(tokens=int(answer["meta_info"]["completion_tokens"]), text=str(answer["text"])) for answer in answers
    ]
