"""Installed by tests.support.servers as ``sglang/bench_serving.py``: sends requests and writes one line of results.

It takes the options that surgeon gives the real one, and its result has the fields that surgeon reads. Standard library
only.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.request
from pathlib import Path


def main() -> None:
    """Send the requests, so many at a time, and append the result to the output file."""
    parser = argparse.ArgumentParser()
    for name in ("backend", "host", "model", "tokenizer", "dataset-name", "random-range-ratio", "output-file"):
        parser.add_argument("--" + name)
    for name in ("port", "random-input-len", "random-output-len", "num-prompts", "max-concurrency", "seed"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--disable-tqdm", action="store_true")
    asked = parser.parse_args()
    body = {"input_ids": [1], "text": "x", "sampling_params": {"max_new_tokens": asked.random_output_len}}
    left = list(range(asked.num_prompts))
    done: list[float] = []

    def work() -> None:
        while left:
            left.pop()
            began = time.monotonic()
            url = f"http://{asked.host}:{asked.port}/generate"
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - http only
                json.loads(answer.read())
            done.append(time.monotonic() - began)

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(asked.max_concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    middle = 1000 * sorted(done)[len(done) // 2] if done else 0.0
    result = {"completed": len(done), "duration": time.monotonic() - began, "median_itl_ms": middle}
    with Path(asked.output_file).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**result, "median_tpot_ms": middle, "median_ttft_ms": middle}) + "\n")


if __name__ == "__main__":
    main()
