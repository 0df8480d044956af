"""No shipped patch does, where a CUDA graph captures it, what a captured graph cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import capture_lint

PATCHES = Path(__file__).parents[2] / "patches"
# Reached by name from route, but run outside of a capture only.
OUTSIDE = {
    "runtime:place": "copies to the device, and returns before that while a stream captures",
    "beacon:write": "files and counters on the host; counters are read from pinned memory, never from the device",
    "beacon:count": "reads nothing; that it allocates, once, is guarded by is_current_stream_capturing",
    "runtime:_load": "an import",
    "runtime:start": "starts a thread that never calls CUDA",
}


def test_what_route_reaches_can_be_captured() -> None:
    """In the code that select_experts calls, nothing waits for the device, sizes by values or branches on a tensor."""
    sources = {path.stem: path.read_text() for path in (PATCHES / "oea").glob("*.py")}
    assert capture_lint.faults(sources, ["route"], OUTSIDE) == []


def test_what_announce_reaches_waits_for_no_device() -> None:
    """At the start of each pass only a change of settings copies from the host."""
    sources = {path.stem: path.read_text() for path in (PATCHES / "oea").glob("*.py") if path.stem != "kernel"}
    found = capture_lint.faults(sources, ["announce"], {"runtime:place": "", "runtime:start": ""})
    assert [fault.split(": ", 1)[1] for fault in found] == [
        "copies from the host: torch.tensor(self.table, dtype=torch.int64)"
    ]
    assert found[0].startswith("runtime:advance:")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return x.item()", "waits for the device"),
        ("return x.sum().tolist()", "waits for the device"),
        ("return x.cpu()", "waits for the device"),
        ("return x.to('cpu')", "waits for the device"),
        ("return x.numpy()", "waits for the device"),
        ("torch.cuda.synchronize()", "waits for the device"),
        ("return torch.equal(x, x)", "waits for the device"),
        ("return int(x.sum())", "reads a tensor on the host"),
        ("return float(x[0])", "reads a tensor on the host"),
        ("return bool((x > 0).all())", "reads a tensor on the host"),
        ("return x.nonzero()", "a shape that depends on values"),
        ("return torch.nonzero(x)", "a shape that depends on values"),
        ("return torch.where(x > 0)", "a shape that depends on values"),
        ("return x.unique()", "a shape that depends on values"),
        ("return torch.masked_select(x, x > 0)", "a shape that depends on values"),
        ("return torch.repeat_interleave(x, x)", "a shape that depends on values"),
        ("return x[x > 0]", "indexed by a tensor"),
        ("mask = x > 0\n    return x[mask]", "indexed by a tensor"),
        ("return x[: x.sum()]", "indexed by a tensor"),
        ("return x[0, x.argmax()]", "indexed by a tensor"),
        ("if x.any():\n        return x", "a branch decided by a tensor"),
        ("if (x > 0).any() and n:\n        return x", "a branch decided by a tensor"),
        ("y = x.sum()\n    while y > 0:\n        pass", "a loop decided by a tensor"),
        ("for _ in x:\n        pass", "a loop decided by a tensor"),
        ("return 1 if x.sum() else 2", "a choice decided by a tensor"),
        ("assert x.min() >= 0", "an assertion decided by a tensor"),
        ("return x.any() or n", "and/or decided by a tensor"),
        ("return not x.any()", "not decided by a tensor"),
        ("return [n for n in x]", "a comprehension decided by a tensor"),
        ("return [1 for y in (x, x + 1) if y.sum()]", "a comprehension decided by a tensor"),
        ("return x + torch.tensor([1])", "copies from the host"),
        ("return x + torch.as_tensor(n)", "copies from the host"),
    ],
)
@pytest.mark.parametrize("helper", [False, True])
def test_each_is_found(line: str, said: str, helper: bool) -> None:  # noqa: FBT001 - a table
    """In route itself and in what it calls in another module."""
    code = f"import torch\ndef NAME(x: torch.Tensor, n: int):\n    {line}\n"
    sources = {"one": code.replace("NAME", "route")}
    if helper:
        sources = {
            "one": "from two import work\ndef route(x):\n    return work(x, 1)\n",
            "two": code.replace("NAME", "work"),
        }
    found = capture_lint.faults(sources, ["route"])
    assert any(said in fault for fault in found), found
    assert capture_lint.faults({**sources, "three": "def route(x):\n    return x\n"}, ["route"]) == found


@pytest.mark.parametrize(
    "line",
    [
        "return x if x is not None else None",
        "if x.shape[0] > n:\n        return x",
        "return x[:, :n] if x.is_cuda and x.dtype == torch.int32 else x",
        "if isinstance(x, torch.Tensor):\n        return x",
        "y = x.topk(2, dim=1).indices\n    return torch.where(x > 0, x, y)",
        "return x.gather(1, x.argmax(1))",
        "return int(n) + x.numel()",
        "return [y.sum() for y in (x, x + 1)]",
    ],
)
def test_what_a_graph_can_do_is_let_pass(line: str) -> None:
    """Decisions by shape, dtype, device or presence are made once, when the graph is captured."""
    code = f"import torch\ndef route(x: torch.Tensor, n: int):\n    {line}\n"
    assert capture_lint.faults({"one": code}, ["route"]) == []


def test_exemptions_must_be_needed() -> None:
    """A name that is spared but never reached is an error, as is a root that is not there."""
    source = {"one": "def route(x):\n    return x\n"}
    with pytest.raises(ValueError, match="exempt without need: one:other"):
        capture_lint.faults(source, ["route"], ["one:other"])
    with pytest.raises(ValueError, match="no function rout"):
        capture_lint.faults(source, ["rout"])
