"""Reads files that ``torch.save`` wrote, without torch and without running anything that is in them.

Such a file is a zip archive of one pickle and the bytes of each tensor. A pickle may name any function to be called;
here the only names that mean anything are tensors, their storages and ``OrderedDict``, and every other one is refused.
What a hostile file can do is fill the memory.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# What each storage holds, as struct calls it.
_STORAGES: Final = {
    "ByteStorage": "B",
    "BoolStorage": "B",
    "CharStorage": "b",
    "ShortStorage": "h",
    "IntStorage": "i",
    "LongStorage": "q",
    "FloatStorage": "f",
    "DoubleStorage": "d",
}
_SIZES: Final = {"B": 1, "b": 1, "h": 2, "i": 4, "q": 8, "f": 4, "d": 8}


class BadFileError(ValueError):
    """The bytes are not what torch.save writes, or hold something that is not read here."""


@dataclass(frozen=True)
class Tensor:
    """A tensor whose bytes are read when they are asked for.

    Attributes:
        shape: its dimensions.
    """

    shape: tuple[int, ...]
    _archive: zipfile.ZipFile
    _member: str
    _format: str
    _offset: int
    _stride: tuple[int, ...]

    def rows(self) -> list[tuple[Any, ...]]:
        """The numbers, one tuple for each run of the last dimension, in order.

        Raises:
            BadFileError: the tensor is a view that is not contiguous, or its bytes are not all there.
        """
        expected = tuple(prod(self.shape[place + 1 :]) for place in range(len(self.shape)))
        if any(size > 1 and s != e for size, s, e in zip(self.shape, self._stride, expected, strict=True)):
            raise BadFileError(f"a tensor of shape {self.shape} has strides {self._stride}; expected contiguous ones")
        try:
            data = self._archive.read(self._member)
        except (KeyError, zipfile.BadZipFile, EOFError, OSError) as error:
            raise BadFileError(f"the bytes of a tensor are missing: {error}") from error
        size, count = _SIZES[self._format], prod(self.shape)
        part = memoryview(data)[self._offset * size : (self._offset + count) * size]
        if len(part) != count * size:
            raise BadFileError(f"a tensor of shape {self.shape} has {len(part)} bytes; expected {count * size}")
        numbers = struct.unpack(f"<{count}{self._format}", part)
        width = self.shape[-1] if self.shape else 1
        return [numbers[start : start + width] for start in range(0, count, width or 1)]


def load(data: bytes) -> Any:
    """What was saved: lists, dictionaries, numbers and texts, with each tensor a :class:`Tensor`.

    Args:
        data: the bytes of the file.

    Raises:
        BadFileError: it is something else, or names anything but tensors.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise BadFileError("it is no zip archive, as torch.save writes since torch 1.6") from error
    inside = archive.namelist()
    pickled = [name for name in inside if name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise BadFileError("it is a zip archive, but not one of torch.save's: it has no data.pkl")
    if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
        raise BadFileError("it is compressed, which torch.save never does")
    folder = pickled[0].removesuffix("data.pkl")
    # Before torch 2.1 there is no such member.
    order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in inside else b"little"
    if order != b"little":
        raise BadFileError(f"its numbers are in the order {order!r}; expected b'little'")
    try:
        return _Reader(archive, folder, archive.read(pickled[0])).load()
    except BadFileError:
        raise
    except Exception as error:
        # A broken pickle raises whatever its broken bytes come to.
        raise BadFileError(f"its pickle is broken: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Storage:
    """A class of torch's that stands for a kind of number."""

    format: str


class _Reader(pickle.Unpickler):
    """An unpickler for which no name means a function of anybody else's."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self._archive = archive
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        if module == "torch" and name in _STORAGES:
            return _Storage(_STORAGES[name])
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor()
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise BadFileError(f"it names {module}.{name}; expected tensors of numbers, lists and dictionaries only")

    def persistent_load(self, pid: Any) -> Any:
        """Where a storage's bytes lie: its member of the archive and its kind."""
        kind, storage, key, _device, _count = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not isinstance(key, str):
            raise BadFileError(f"it refers to {pid!r}; expected the storage of a tensor")
        return f"{self._folder}data/{key}", storage.format

    def _tensor(self) -> Callable[..., Tensor]:
        archive = self._archive

        def rebuild(storage: tuple[str, str], offset: int, size: Any, stride: Any, *_rest: Any) -> Tensor:
            member, kind = storage
            shape = tuple(int(one) for one in size)
            return Tensor(shape, archive, member, kind, int(offset), tuple(int(one) for one in stride))

        return rebuild
