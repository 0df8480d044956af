"""Finds, in code that a CUDA graph captures, what a captured graph cannot do: reading from the device, and its kin.

It follows calls by name through a few modules, from functions named as roots; that reaches more than really runs, never
less. Inside each function it knows tensors by their annotations, by torch's functions and by what is computed from
tensors. What is decided by a tensor's shape, dtype or device is no decision by its values.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

READS: Final = {"item", "tolist", "cpu", "numpy", "is_nonzero", "synchronize", "equal", "allclose"}
SIZES: Final = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "histc"}
COPIES: Final = {"tensor", "as_tensor", "from_numpy", "scalar_tensor", "asarray"}
PLAIN: Final = {"shape", "dtype", "device", "is_cuda", "ndim", "requires_grad"}
PLAIN_CALLS: Final = {"numel", "dim", "size", "stride", "element_size", "is_floating_point", "data_ptr"}
CASTS: Final = {"int", "float", "bool", "len"}


@dataclass
class _Function:
    module: str
    node: ast.FunctionDef
    calls: set[str] = field(default_factory=set)

    @property
    def where(self) -> str:
        return f"{self.module}:{self.node.name}"


def faults(sources: Mapping[str, str], roots: Collection[str], exempt: Collection[str] = ()) -> list[str]:
    """What in the code that the roots reach a captured graph cannot do.

    Args:
        sources: Python modules by name.
        roots: names of functions to begin with.
        exempt: functions, as ``module:name``, that run outside of a capture; what they call is not followed.

    Returns:
        One line for each, with module, function, line and what was found.

    Raises:
        ValueError: a root is not there, or an exempt function is not reached.
    """
    trees = {module: ast.parse(source) for module, source in sources.items()}
    functions = [one for module, tree in trees.items() for one in _functions(module, tree)]
    attributes = {name for tree in trees.values() for name in _tensor_attributes(tree)}
    missing = set(roots) - {one.node.name for one in functions}
    if missing:
        raise ValueError(f"no function {', '.join(sorted(missing))}")
    reached: dict[str, _Function] = {}
    queue = [one for one in functions if one.node.name in roots]
    spared = set()
    while queue:
        one = queue.pop()
        if one.where in exempt:
            spared.add(one.where)
        elif one.where not in reached:
            reached[one.where] = one
            queue += [other for other in functions if other.node.name in one.calls]
    if set(exempt) - spared:
        raise ValueError(f"exempt without need: {', '.join(sorted(set(exempt) - spared))}")
    return sorted(fault for one in reached.values() for fault in _Reader(one, attributes).read())


def _functions(module: str, tree: ast.Module) -> Iterator[_Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(d) for d in node.decorator_list):
            called = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
            names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in called}
            loaded = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}  # properties too
            yield _Function(module, node, names | loaded)


def _tensor_attributes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_torch_call(node.value):
            yield from (target.attr for target in node.targets if isinstance(target, ast.Attribute))


def _is_torch_call(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[0] == "torch"
        and (ast.unparse(node.func).split(".")[1] in {"full", "zeros", "ones", "empty", "tensor", "arange"})
    )


class _Reader(ast.NodeVisitor):
    """Reads one function in order, keeping track of which names are tensors."""

    def __init__(self, function: _Function, attributes: Collection[str]) -> None:
        self._function = function
        self._attributes = attributes
        self._tensors: set[str] = set()
        self._found: list[str] = []
        arguments = function.node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None and "Tensor" in ast.unparse(argument.annotation):
                self._tensors.add(argument.arg)

    def read(self) -> list[str]:
        """The function's faults."""
        for _ in range(2):  # twice, for names that a loop makes tensors of further down
            self._found.clear()
            for statement in self._function.node.body:
                self.visit(statement)
        return self._found

    def _fault(self, node: ast.AST, what: str) -> None:
        self._found.append(f"{self._function.where}:{getattr(node, 'lineno', 0)}: {what}")

    def _is_tensor(self, node: ast.expr | None) -> bool:  # noqa: PLR0911 - one answer for each kind of expression
        """Whether the value may depend on what a tensor holds."""
        match node:
            case ast.Name(id=name):
                return name in self._tensors
            case ast.Attribute(value=value, attr=attr):
                return attr not in PLAIN and (attr in self._attributes or self._is_tensor(value))
            case ast.Call(func=ast.Name(id="isinstance")):
                return False
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in PLAIN_CALLS and self._is_tensor(value):
                return False
            case ast.Call(func=func, args=args, keywords=keywords):
                values = [*args, *(k.value for k in keywords)]
                return self._is_tensor(func) or any(self._is_tensor(value) for value in values)
            case ast.Compare(ops=ops) if all(isinstance(op, ast.Is | ast.IsNot) for op in ops):
                return False
            case ast.Compare(left=left, comparators=others):
                return any(self._is_tensor(one) for one in (left, *others))
            case ast.Constant() | ast.Lambda() | None:
                return False
        return any(self._is_tensor(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))

    def _decides(self, test: ast.expr, what: str) -> None:
        if self._is_tensor(test):
            self._fault(test, f"{what} decided by a tensor: {ast.unparse(test)}")

    def _assign(self, target: ast.expr, *, tensor: bool) -> None:
        for name in ast.walk(target):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and tensor:
                self._tensors.add(name.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, tensor=self._is_tensor(node.value))

    def _goes_through(self, node: ast.For | ast.comprehension, what: str) -> None:
        if not isinstance(node.iter, ast.Tuple | ast.List):  # those hold tensors, and their length is known
            self._decides(node.iter, what)
        self._assign(node.target, tensor=self._is_tensor(node.iter))

    def visit_For(self, node: ast.For) -> None:
        self._goes_through(node, "a loop")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._decides(node.test, "a branch")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._decides(node.test, "a loop")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._decides(node.test, "a choice")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._decides(node.test, "an assertion")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values[:-1]:
            self._decides(value, "and/or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._decides(node.operand, "not")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._goes_through(node, "a comprehension")
        for test in node.ifs:
            self._decides(test, "a comprehension")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            bounds = [part.lower, part.upper, part.step] if isinstance(part, ast.Slice) else [part]
            if any(self._is_tensor(bound) for bound in bounds):
                self._fault(node, f"indexed by a tensor, whose number of hits may vary: {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        text, func = ast.unparse(node)[:90], node.func
        values = [*node.args, *(k.value for k in node.keywords)]
        on_tensors = self._is_tensor(func) or any(self._is_tensor(value) for value in values)
        if isinstance(func, ast.Name) and func.id in CASTS and on_tensors:
            self._fault(node, f"reads a tensor on the host: {text}")
        if not isinstance(func, ast.Attribute):
            return
        of_torch = isinstance(func.value, ast.Name) and func.value.id == "torch"
        if func.attr in READS and (on_tensors or ast.unparse(func.value).startswith("torch")):
            self._fault(node, f"waits for the device: {text}")
        elif func.attr in SIZES or (func.attr == "where" and of_torch and len(values) == 1):
            self._fault(node, f"a shape that depends on values: {text}")
        elif func.attr in COPIES and of_torch:
            self._fault(node, f"copies from the host: {text}")
        elif func.attr == "to" and "cpu" in text:
            self._fault(node, f"waits for the device: {text}")
        elif func.attr == "repeat_interleave" and any(self._is_tensor(value) for value in node.args):
            self._fault(node, f"a shape that depends on values: {text}")
