"""A real sglang server on the CPU behind a real SSH server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from surgeon.node.target import Target


def target() -> Target:
    """The lab as a node to work on, which is what ``--host lab`` means.

    Raises:
        SurgeonError: no lab is up.
    """
    from surgeon.lab.lifecycle import target as running

    return running()


def torch_layer() -> Path:
    """A folder with a CPU torch for the running interpreter, to be put on ``sys.path``; built on first use.

    Raises:
        SurgeonError: it could not be built.
    """
    from surgeon.lab.build import torch_layer as shared

    return shared()


def triton_layer() -> Path:
    """A folder with the Triton that goes with :func:`torch_layer`, to be put behind it; built on first use.

    Raises:
        SurgeonError: it could not be built.
    """
    from surgeon.lab.build import triton_layer as shared

    return shared()
