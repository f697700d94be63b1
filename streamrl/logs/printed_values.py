"""Read numbers and dicts as Python and JSON print them, without running any code."""

from __future__ import annotations

import ast
import re
import warnings
from math import inf, nan

from streamrl.workload.data_files import parse_number

LiteralValue = dict[str, object]
NAMES: dict[str, object] = {
    "nan": nan,
    "inf": inf,
    "NaN": nan,
    "Infinity": inf,
    "true": True,
    "false": False,
    "null": None,
}
"""Names in printed dicts and in JSON, with their values."""
WRAPPERS = ("float", "int", "tensor", "array", "bool")
"""Parts of type names around numbers, such as np.float64(1.5) and tensor(2)."""
WRAPPED = re.compile(r"[a-z][a-z0-9_.]*\([^#]*\)", re.ASCII)
"""A number in a type name."""


def read_dict(text: str) -> LiteralValue:
    """Return a dict with text keys from its Python literal.

    Raises:
        ValueError: the text is something else, or contains more than literals.
    """
    found = _parse(text)
    if not isinstance(found, dict):
        raise ValueError("not a dict")
    return {str(key): value for key, value in found.items()}


def read_number(value: object) -> float | None:
    """Return a number, or the number in a text, also in a type name; None for all else."""
    if isinstance(value, str):
        text = value.strip()
        try:
            if text in NAMES or WRAPPED.fullmatch(text):
                value = _parse(text)
            else:
                return parse_number(text)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # from an integer with hundreds of digits
        return inf


def _parse(text: str) -> object:
    try:
        with warnings.catch_warnings(action="ignore"):  # about unusual literals
            return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"not a literal: {getattr(error, 'msg', error)}") from None


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in NAMES:
            return NAMES[name]
        case ast.UnaryOp(ast.USub(), operand):
            number = _value(operand)
            if isinstance(number, int | float):
                return -number
        case ast.Dict(keys, values) if all(key is not None for key in keys):
            return {
                _key(key): _value(value) for key, value in zip(keys, values, strict=True) if key
            }
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            return [_value(element) for element in elements]
        case ast.Call(func, [argument]) if _is_wrapper(func):
            return _value(argument)
        case _:
            pass
    raise ValueError(f"{ast.unparse(node)[:40]} is not a literal")


def _key(node: ast.expr) -> str:
    return str(_value(node))


def _is_wrapper(node: ast.expr) -> bool:
    """Return whether a call is of a type that wraps numbers; nothing is called."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.rstrip("0123456789") in WRAPPERS
