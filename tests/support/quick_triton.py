"""Triton's interpreter, several times as fast, for tests that run thousands of small programs.

The interpreter spends its time on finding out, anew for each operation of each program, what type the result has.
Here operations on operands of one and the same type, and on a tensor and a Python number, go to numpy at once; a number
becomes whatever tensor the interpreter itself made of it the first time. Everything else, and every first time, is the
interpreter as it is. Tests run a share of their cases on it unchanged, since this is only a way to run more of them.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np  # type: ignore[import-not-found]  # it comes with torch, which is not there where types are checked
import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

_ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
_BITS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor}
_COMPARISONS: dict[str, Any] = {f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}


class _Kept:
    """Stands for the record of what to take back after a launch: nothing."""

    def restore(self) -> None:
        """Leave the language as it is."""


class _Quick:
    """The replaced operations and what they have learned."""

    def __init__(self) -> None:
        self._constants: dict[tuple[Any, ...], Any] = {}
        self._truth: dict[str, Any] = {}

    def constant(self, number: Any, like: Any) -> Any:
        """The data of the tensor that the interpreter makes of a number beside a tensor of this type, or None."""
        key = (type(number), number, like.type.name)
        if key not in self._constants:
            lhs, rhs = interpreter.interpreter_semantic.binary_op_type_checking_impl(like, number)
            self._constants[key] = rhs.handle.data if lhs is like else None
        return self._constants[key]

    def truth_of(self, kind: Any) -> Any:
        """The type of a comparison's result."""
        if kind.name not in self._truth:
            self._truth[kind.name] = kind.with_element_ty(tl.int1) if kind.is_block() else tl.int1
        return self._truth[kind.name]

    def other(self, mine: Any, other: Any) -> Any:
        """The other operand's data if it needs no conversion and fits in mine, else None."""
        if isinstance(other, tl.constexpr):
            other = other.value
        if isinstance(other, tl.tensor):
            fits = other.type.name in (mine.type.name, mine.dtype.name)
            return other.handle.data if fits else None
        return self.constant(other, mine) if type(other) in (int, float) else None

    def binary(self, name: str, compute: Any, *, compares: bool, bools: bool) -> Callable[..., Any]:
        """A method of tl.tensor that is quick where it can be."""
        slow = getattr(tl.tensor, name)

        def method(mine: Any, other: Any, **more: Any) -> Any:
            scalar = mine.dtype
            if not scalar.is_ptr() and (bools or scalar != tl.int1):
                data = self.other(mine, other)
                kind = mine.type
                if data is None and isinstance(other, tl.tensor) and other.dtype.name == mine.type.name:
                    data, kind = other.handle.data, other.type  # a scalar beside a block
                if data is not None:
                    kind = self.truth_of(kind) if compares else kind
                    out = compute(mine.handle.data, data)
                    return tl.tensor(interpreter.TensorHandle(out, tl.int1 if compares else scalar), kind)
            return slow(mine, other, **more)

        return method

    def where(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """``tl.where``."""

        def quick(condition: Any, x: Any, y: Any, **more: Any) -> Any:
            like = x if isinstance(x, tl.tensor) else y
            both = isinstance(like, tl.tensor) and isinstance(condition, tl.tensor)
            if both and not like.dtype.is_ptr() and condition.type.name == self.truth_of(like.type).name:
                yes = x.handle.data if like is x else self.other(like, x)
                no = self.other(like, y)
                if yes is not None and no is not None:
                    out = np.where(condition.handle.data, yes, no)
                    return tl.tensor(interpreter.TensorHandle(out, like.dtype), like.type)
            return slow(condition, x, y, **more)

        return quick

    def reduction(self, slow: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
        """``tl.max``, ``tl.min`` or ``tl.sum`` of a vector."""

        def quick(values: Any, axis: Any = None, **more: Any) -> Any:
            data = values.handle.data
            if axis == 0 and not more and data.ndim == 1 and values.dtype in (tl.int32, tl.int64):
                return tl.tensor(interpreter.TensorHandle(compute(data), values.dtype), values.dtype)
            return slow(values, axis, **more)

        return quick


def _sum(data: Any) -> Any:
    return np.sum(data, dtype=data.dtype)


def quicken(ors: str) -> None:  # noqa: C901 - one replacement after another
    """Speed up the interpreter of this process, for good.

    Args:
        ors: name of the kernel's own combining function that does ``left | right``, which numpy knows too.
    """
    known: set[tuple[bool, ...]] = set()
    seen: dict[int, Any] = {}
    patch = interpreter._patch_lang
    quick = _Quick()

    def install() -> None:
        for name, compute in _ARITHMETIC.items():
            setattr(tl.tensor, name, quick.binary(name, compute, compares=False, bools=False))
        for name, compute in _BITS.items():
            setattr(tl.tensor, name, quick.binary(name, compute, compares=False, bools=True))
        for name, compute in _COMPARISONS.items():
            setattr(tl.tensor, name, quick.binary(name, compute, compares=True, bools=False))
        tl.where = quick.where(tl.where)

    def patch_once(function: Any) -> Any:
        # The interpreter exchanges the language's functions on each call of a device function; once is enough.
        names = function.__globals__
        if id(names) not in seen:
            seen[id(names)] = names
            languages = tuple(value is tl for value in names.values() if value is tl or value is tl.core)
            if languages not in known:
                known.add(languages)
                patch(function)
                install()
        return _Kept()

    reduce = interpreter.ReduceOps.generic_reduce

    def reduce_quickly(self: Any, values: Any) -> Any:
        if self.combine_fn.fn.__name__ == ors and not self.keep_dims:
            (value,) = values
            return [self.to_tensor(np.bitwise_or.reduce(value.handle.data, axis=self.axis), value.dtype)]
        return reduce(self, values)

    kinds: dict[str, Any] = {}
    numpy_of = interpreter._get_np_dtype

    def numpy_kind(kind: Any) -> Any:
        if kind.name not in kinds:
            kinds[kind.name] = numpy_of(kind)
        return kinds[kind.name]

    interpreter._get_np_dtype = numpy_kind
    interpreter._patch_lang = patch_once
    interpreter.ReduceOps.generic_reduce = reduce_quickly
    # Each sum of integers is otherwise taken twice, once in 64 bits to find overflows.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    tl.max = quick.reduction(tl.max, np.max)
    tl.min = quick.reduction(tl.min, np.min)
    tl.sum = quick.reduction(tl.sum, _sum)
