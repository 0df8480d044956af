"""Keeps secrets on the node: what may leave of command lines, environments and texts."""

from __future__ import annotations

import re
from typing import Dict, Iterable, List, Sequence, Set

MASK = "****"

# A name is secret when it ends like one. `--tokenizer-path` and `--max-total-tokens` do not.
_SECRET_NAME = re.compile(r"(^|[_-])(key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)

# sglang prints its arguments at start: server_args=ServerArgs(..., api_key='...', ...).
_SECRET_IN_TEXT = re.compile(
    r"""(\b\w*(?:api_key|hf_token|auth_token|access_token|_secret|password)['"]?\s*[=:]\s*)(['"])[^'"\n]*\2""",
    re.IGNORECASE,
)

_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s'\"]+@", re.IGNORECASE)

# Shorter values would mask ordinary words of a log.
_SHORTEST_SECRET = 6

# What of a server's environment is worth showing: it decides where code comes from and how it runs.
_SHOWN_PREFIXES = (
    "SGLANG_",
    "SGL_",
    "CUDA_",
    "NCCL_",
    "PYTHON",
    "HF_",
    "TORCH",
    "TRITON_",
    "FLASHINFER_",
    "OMP_",
    "SAFETENSORS_",
)
_SHOWN = {
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "HUGGINGFACE_HUB_CACHE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
}


def is_secret(name: str) -> bool:
    """Tell whether an option or a variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(name.lstrip("-")))


def argv(words: Sequence[str]) -> List[str]:
    """Return a command line whose secrets are masked, in ``--name value`` and ``--name=value``."""
    shown: List[str] = []
    hide_next = False
    for word in words:
        name, separator, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            shown.append(MASK)
        elif separator and is_secret(name):
            shown.append(name + separator + MASK)
        else:
            shown.append(_USERINFO.sub(r"\1" + MASK + "@", word))
        hide_next = word.startswith("--") and not separator and is_secret(word)
    return shown


def environ(variables: Dict[str, str]) -> Dict[str, str]:
    """Return the part of an environment that is shown, its secrets masked."""
    shown = {}
    for name, value in sorted(variables.items()):
        if name.startswith(_SHOWN_PREFIXES) or name.upper() in _SHOWN:
            shown[name] = MASK if is_secret(name) else _USERINFO.sub(r"\1" + MASK + "@", value)
    return shown


def secrets(words: Sequence[str], variables: Dict[str, str]) -> Set[str]:
    """Return the secret values of a command line and an environment, for ``text``."""
    found = {value for name, value in variables.items() if is_secret(name)}
    for word, following in zip(words, [*words[1:], ""]):  # noqa: B905 - strict= needs 3.10
        name, separator, value = word.partition("=")
        if word.startswith("--") and is_secret(name):
            found.add(value if separator else following)
    return {value for value in found if len(value) >= _SHORTEST_SECRET}


def text(words: str, values: Iterable[str] = ()) -> str:
    """Return a text without these secret values, and without what looks like one in a printed argument."""
    for value in sorted(values, key=len, reverse=True):
        words = words.replace(value, MASK)
    return _USERINFO.sub(r"\1" + MASK + "@", _SECRET_IN_TEXT.sub(r"\1\2" + MASK + r"\2", words))
