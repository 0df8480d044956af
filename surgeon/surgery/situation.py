"""What is known about a server when its live path is judged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEVELOPMENT = (999, 0, 0)
_SM100_MAJOR = 10


@dataclass(frozen=True)
class Situation:
    """A server, as far as the choice of experts depends on it.

    Attributes:
        release: sglang's; a development build counts as newer than every release.
        architecture: the model class, if known.
        config: the model's config.json; may be empty.
        args: sglang's server arguments by field name.
        capability: the GPU's compute capability, if there is one and it is known.
        device: "cuda", "cpu", ... if known.
        backend: the MoE runner backend, "auto" if none was asked for.
        quantization: the server argument.
        checkpoint_quantization: the `quant_method` that the checkpoint declares.
        resolved: the arguments come from a running server, which has resolved "auto" as far as it goes.
        kernels: whether the sgl_kernel package is installed, if known.
    """

    release: tuple[int, int, int]
    architecture: str | None
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    capability: tuple[int, int] | None
    device: str | None
    backend: str
    quantization: str | None
    checkpoint_quantization: str | None
    resolved: bool
    kernels: bool | None

    @property
    def plain_auto(self) -> bool:
        """`auto` as typed, without an all-to-all backend that would choose for itself."""
        return self.backend == "auto" and not self.resolved and self.args.get("moe_a2a_backend") in {None, "none"}

    @property
    def sm100(self) -> bool:
        """A data-centre Blackwell: what sglang's `is_sm100_supported` tests; SM120 is none."""
        return self.capability is not None and self.capability[0] == _SM100_MAJOR


def situation(
    version: str,
    architecture: str | None,
    config: Mapping[str, Any],
    server_args: Mapping[str, Any],
    compute_capability: tuple[int, int] | None,
    *,
    kernels: bool | None,
) -> Situation:
    """Gather what `live_path` was given; its arguments are described there."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2]), int(found[3])) if found else _DEVELOPMENT
    names = config.get("architectures") or [None]
    quantized = config.get("quantization_config")
    device = server_args.get("device")
    if device is None and compute_capability is not None:
        device = "cuda"
    return Situation(
        release=release if release > (0, 0, 0) else _DEVELOPMENT,
        architecture=architecture or names[0],
        config=config,
        args=server_args,
        capability=compute_capability,
        device=str(device).partition(":")[0] if device is not None else None,
        backend=server_args.get("moe_runner_backend") or "auto",
        quantization=server_args.get("quantization"),
        checkpoint_quantization=quantized.get("quant_method") if isinstance(quantized, dict) else None,
        resolved="internal_states" in server_args,
        kernels=kernels,
    )
