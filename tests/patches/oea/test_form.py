"""Which form of the operator runs: the fused one on a GPU, and torch wherever that one cannot."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """Says of itself that it lies on a GPU; where it really lies matters to no test here."""

    is_cuda = True


class Kernel:
    """Stands for the fused form."""

    def __init__(self, *, unfit: str | None = None, fails: bool = False) -> None:
        self.calls = 0
        self._unfit, self._fails = unfit, fails

    def unfit(self, *_: Any) -> str | None:
        """Why it cannot do a call."""
        return self._unfit

    def reroute(self, *_: Any) -> str:
        """Answers, or breaks as a compiler does."""
        self.calls += 1
        if self._fails:
            raise RuntimeError("no such instruction")
        return "fused"


def ask(runtime: ModuleType, *, gpu: bool = True) -> Any:
    """One call, past the gate."""
    logits = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    weights, ids = logits.softmax(-1).topk(4)
    given = ids.as_subclass(OnGpu) if gpu else ids
    return runtime._FORM.reroute(weights, given, logits, None, runtime._NOW.real_rows, runtime._operator.Rule(k=4))


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, Kernel | None], None]:
    """Put this in the fused form's place; None makes its import fail."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def kernel(runtime: ModuleType, stand_in: Kernel | None) -> None:
        monkeypatch.setitem(sys.modules, f"{runtime.__package__}._surgeon_oea_kernel", stand_in)

    return kernel


def test_a_gpu_gets_the_fused_form(fresh: Callable[..., ModuleType], put: Callable[..., None]) -> None:
    """On a GPU it answers; on the CPU it is not even loaded."""
    runtime, kernel = fresh(), Kernel()
    put(runtime, kernel)
    assert ask(runtime, gpu=False) != "fused"
    assert (runtime._FORM.name, kernel.calls) == ("torch", 0)
    assert [ask(runtime), ask(runtime)] == ["fused", "fused"]
    assert (runtime._FORM.name, kernel.calls) == ("triton", 2)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (None, "torch (no fused form: "),
        (Kernel(fails=True), "torch (the fused form failed: no such instruction)"),
        (Kernel(unfit="9999 rows"), "triton"),
    ],
    ids=["absent", "broken", "unfit"],
)
def test_torch_goes_on_where_it_cannot(
    kernel: Kernel | None,
    name: str,
    fresh: Callable[..., ModuleType],
    put: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever keeps the fused form from answering, torch gives what it always gives, and the beacon says which."""
    runtime = fresh()
    put(runtime, kernel)
    for _ in range(2):
        for found, expected in zip(ask(runtime), ask(runtime, gpu=False), strict=True):
            assert torch.equal(found, expected)
    assert runtime._NOW.tell()["form"].startswith(name)
    assert caplog.text.count("the fused form failed") == (kernel is not None and kernel._fails)
    assert kernel is None or kernel.calls == kernel._fails


def test_a_failure_while_capturing_is_not_swallowed(
    fresh: Callable[..., ModuleType], put: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that broke cannot go on with other kernels: it must fail as sglang expects."""
    runtime = fresh()
    put(runtime, Kernel(fails=True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no such instruction"):
        ask(runtime)
