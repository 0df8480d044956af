"""A file's bytes as lines, the byte order mark apart."""

from __future__ import annotations

import codecs


def split_lines(source: bytes) -> tuple[bytes, ...]:
    r"""Lines as Python's tokenizer sees them, each with its own line end: ``\n``, ``\r\n`` or ``\r``.

    Args:
        source: text in an encoding that extends ASCII.
    """
    return tuple(source.splitlines(keepends=True))


def split_bom(source: bytes) -> tuple[bytes, bytes]:
    """The UTF-8 byte order mark, or nothing, and the rest.

    Args:
        source: a file's bytes.
    """
    bom = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    return bom, source[len(bom) :]
