"""Splits an assert between the untrusted child and the trusted parent, and judges it here.

``assert math.isclose(area(3), 7.07, rel_tol=0.01)`` becomes the expression ``area(3)``, which the
sandbox evaluates, and a test of its value, which this module evaluates over an allow-list of syntax
and functions. So the expected value never reaches the code under test, and no code from a dataset
file runs in this process.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlkv.errors import DataError

_PURE = (
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "float", "frozenset",
    "int", "isinstance", "len", "list", "max", "min", "range", "reversed", "round", "set", "sorted",
    "str", "sum", "tuple", "zip", "bytes",
)  # fmt: skip
_TYPES = ("bool", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
_COMPARE: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[..., object]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_EXPLOSIVE = ("factorial", "perm", "comb")
MAX_RANGE = 100_000
"""Longest range a test may build from a value."""


class _Slot(ast.expr):
    """Where a value from the sandbox goes."""

    _fields = ()

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


@dataclass(frozen=True)
class SplitAssert:
    """One assert: what the sandbox evaluates, and how its values are judged."""

    expressions: tuple[str, ...]
    """Source of each part that uses names of the code under test."""
    residue: ast.expr
    """The assert's test, with a slot in place of each of them."""

    def holds(self, values: Sequence[object]) -> bool:
        """Whether the assert is true for ``values``, one for each of ``expressions``."""
        try:
            return bool(_Evaluator(values).visit(self.residue))
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError):
            return False  # what the candidate returned does not fit the assert

    def names(self) -> set[str]:
        """Names of the code under test that the assert uses."""
        trees = [ast.parse(text, mode="eval") for text in self.expressions]
        return {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}


def split_assert(source: str) -> SplitAssert:
    """Splits one ``assert …`` statement.

    Raises:
        DataError: It is not one assert, or uses what this module does not evaluate.

    Example:
        >>> split_assert("assert set(f(1)) == {1, 2}").expressions
        ('f(1)',)
        >>> split_assert("assert set(f(1)) == {1, 2}").holds([[2, 1, 1]])
        True
    """
    try:
        body = ast.parse(source.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"test {source[:80]!r} is not Python ({error}); fix the data") from error
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise DataError(f"test {source[:80]!r} is not one assert statement; fix the data")
    splitter = _Splitter(_PURE)
    residue = splitter.visit(body[0].test)
    if not splitter.expressions:
        # MBPP has programs named like a built-in: ``assert sum(10, 15) == 6``
        splitter = _Splitter(())
        residue = splitter.visit(ast.parse(source.strip()).body[0].test)  # type: ignore[attr-defined]
    split = SplitAssert(tuple(splitter.expressions), residue)
    if not split.expressions:
        raise DataError(f"test {source[:80]!r} calls nothing of the code under test; fix the data")
    try:
        _Evaluator([0] * len(split.expressions)).visit(residue)
    except DataError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError):
        pass  # only the syntax is checked here; the zeros need not fit
    return split


def _root(node: ast.expr) -> ast.expr:
    """The innermost expression of a chain of calls, attributes and subscripts."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


class _Splitter(ast.NodeTransformer):
    """Replaces each outermost use of a name of the code under test by a slot."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self.trusted = (*trusted, "math")
        self.expressions: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.Call, ast.Attribute, ast.Subscript, ast.Name)):
            root = _root(node)
            if isinstance(root, ast.Name) and root.id not in self.trusted:
                self.expressions.append(ast.unparse(node))
                return _Slot(len(self.expressions) - 1)
        return super().visit(node)


class _Evaluator(ast.NodeVisitor):
    """Evaluates the residue of an assert; anything not listed is a DataError."""

    def __init__(self, values: Sequence[object]) -> None:
        self.values = values

    def generic_visit(self, node: ast.AST) -> object:
        raise DataError(
            f"a test uses {type(node).__name__}, which is not evaluated outside the sandbox; "
            "write it as comparisons and calls of plain built-in functions"
        )

    def visit__Slot(self, node: _Slot) -> object:
        return self.values[node.index]

    def visit_Constant(self, node: ast.Constant) -> object:
        return node.value

    def visit_List(self, node: ast.List) -> object:
        return [self.visit(item) for item in node.elts]

    def visit_Tuple(self, node: ast.Tuple) -> object:
        return tuple(self.visit(item) for item in node.elts)

    def visit_Set(self, node: ast.Set) -> object:
        return {self.visit(item) for item in node.elts}

    def visit_Dict(self, node: ast.Dict) -> object:
        if None in node.keys:
            return self.generic_visit(node)
        pairs = zip(node.keys, node.values, strict=True)
        return {self.visit(key): self.visit(value) for key, value in pairs if key is not None}

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        if type(node.op) not in _UNARY:
            return self.generic_visit(node)
        return _UNARY[type(node.op)](self.visit(node.operand))

    def visit_BinOp(self, node: ast.BinOp) -> object:
        if type(node.op) not in _BINARY:
            return self.generic_visit(node)
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, (ast.Mult, ast.Pow, ast.Mod)):
            # a candidate's value must not make us build something huge, or format a string
            bound = 64 if isinstance(node.op, ast.Pow) else 10**5
            if not all(isinstance(side, (int, float, complex)) for side in (left, right)):
                raise TypeError("numbers only")
            if isinstance(right, int) and isinstance(node.op, ast.Pow) and abs(right) > bound:
                raise ValueError("exponent too large")
        return _BINARY[type(node.op)](left, right)

    def visit_BoolOp(self, node: ast.BoolOp) -> object:
        result: object = None
        for operand in node.values:
            result = self.visit(operand)
            if bool(result) is isinstance(node.op, ast.Or):
                break
        return result

    def visit_Compare(self, node: ast.Compare) -> object:
        left = self.visit(node.left)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.visit(comparator)
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def visit_Subscript(self, node: ast.Subscript) -> object:
        return self.visit(node.value)[self.visit(node.slice)]  # type: ignore[index]

    def visit_Name(self, node: ast.Name) -> object:
        return getattr(builtins, node.id) if node.id in _TYPES else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> object:
        known = isinstance(node.value, ast.Name) and node.value.id == "math"
        if not known or node.attr.startswith("_") or node.attr not in vars(math):
            return self.generic_visit(node)
        return getattr(math, node.attr)

    def visit_Call(self, node: ast.Call) -> object:
        if any(keyword.arg is None for keyword in node.keywords):
            return self.generic_visit(node)
        arguments = [self.visit(argument) for argument in node.args]
        keywords = {str(k.arg): self.visit(k.value) for k in node.keywords}
        if isinstance(node.func, ast.Name) and node.func.id in _PURE:
            function = getattr(builtins, node.func.id)
            if node.func.id in ("range", "bytes") and any(
                isinstance(a, int) and abs(a) > MAX_RANGE for a in arguments
            ):
                raise ValueError("range too large")
        elif isinstance(node.func, ast.Attribute) and node.func.attr not in _EXPLOSIVE:
            function = self.visit(node.func)
        else:
            return self.generic_visit(node)
        return function(*arguments, **keywords)  # type: ignore[operator]
