"""What it takes to run one sglang release on the CPU: the requirements that an environment gets."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from email.parser import HeaderParser
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from surgeon.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

TORCH = ("torch==2.13.0", "numpy<2.4")  # numba, which sglang 0.5.23 pins, refuses a newer numpy
TRITON = ("triton==3.9.0",)  # sglang imports it everywhere and runs none of it on the CPU; 1 GB, so shared

# The requirements of sglang that its server imports without a GPU, in the versions that each release asks for.
_ON_CPU = frozenset(
    canonicalize_name(name)
    for name in (
        *("aiohttp", "anthropic", "apache-tvm-ffi", "blobfile", "compressed-tensors", "datasets", "distro"),
        *("easydict", "einops", "fastapi", "gguf", "hf_transfer", "huggingface_hub", "interegular", "IPython"),
        *("llguidance", "mistral_common", "modelscope", "msgspec", "ninja", "numba", "numpy", "nvidia-ml-py"),
        *("openai", "openai-harmony", "orjson", "outlines", "packaging", "partial_json_parser", "pillow"),
        *("prometheus-client", "psutil", "pybase64", "pydantic", "python-dateutil", "python-multipart"),
        *("pyzmq", "regex", "requests", "scipy", "sentencepiece", "setproctitle", "soundfile", "tiktoken"),
        *("tokenizers", "tqdm", "transformers", "uvicorn", "uvloop", "watchfiles", "xgrammar", "xxhash"),
        "zstandard",
    )
)


@dataclass(frozen=True)
class Recipe:
    """How to make one sglang release run on the CPU.

    Attributes:
        sglang: the release.
        pythons: Python versions, (major, minor), that its wheel installs on.
        alone: requirements installed without what they require, since that would bring GPU builds.
        recorder: whether its expert-distribution recorder runs on the CPU.
    """

    sglang: str
    pythons: tuple[tuple[int, int], ...]
    alone: tuple[str, ...] = ("torchvision==0.28.0",)
    recorder: bool = True

    def digest(self, python: str) -> str:
        """Eight hex digits that change when the environment would be built differently.

        Args:
            python: version of the interpreter, such as ``"3.11"``.
        """
        content = json.dumps([asdict(self), TORCH, TRITON, sorted(_ON_CPU), python], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:8]


RECIPES = {
    "0.5.23": Recipe("0.5.23", pythons=((3, 11),)),  # its wheel holds compiled code for CPython 3.11
    "0.5.9": Recipe("0.5.9", pythons=((3, 11), (3, 12), (3, 13)), recorder=False),
}
DEFAULT = "0.5.23"


def recipe(sglang: str) -> Recipe:
    """The recipe of one release.

    Args:
        sglang: the release.

    Raises:
        UsageError: the lab has no recipe for it.
    """
    if sglang not in RECIPES:
        raise UsageError(
            f"The lab knows how to run sglang {' and '.join(RECIPES)} on a CPU, not {sglang}.",
            advice=f"Choose one of them: --sglang {DEFAULT}",
        )
    return RECIPES[sglang]


def requirements(unpacked: Path, python: str) -> list[str]:
    """What sglang itself asks for, without what only a GPU needs.

    Args:
        unpacked: a folder with one sglang wheel's content.
        python: version of the interpreter it is for, such as ``"3.11"``.

    Returns:
        Requirements with sglang's own version limits, for pip.
    """
    (metadata,) = unpacked.glob("sglang-*.dist-info/METADATA")
    declared = HeaderParser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
    environment = {"extra": "", "python_version": python}
    asked = [Requirement(line) for line in declared]
    return [
        f"{one.name}{one.specifier}"
        for one in asked
        if canonicalize_name(one.name) in _ON_CPU and (one.marker is None or one.marker.evaluate(environment))
    ]
