"""Conditions on the columns of raw data, such as `aesthetic >= 5 and not punsafe >= 0.1`.

A condition is written in a small part of Python's syntax: names of columns, numbers, strings in quotes, comparisons,
`and`, `or`, `not` and parentheses. It is parsed as Python, but never run as Python.
"""

from __future__ import annotations

import argparse
import ast
from functools import reduce
from typing import TYPE_CHECKING, Any

from common import cli
from common.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

COMPARISONS = {  # {node: function of pyarrow.compute}
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
}
FILTERS = ("where", "min_side", "max_aspect")  # the flags
OTHERS = (ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.Name, ast.Load)


def add_filter_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags that leave rows out; such rows are not bad."""
    where = (
        "condition on the columns of Parquet files, such as 'aesthetic >= 5 and punsafe < 0.1'; other rows are left "
    )
    where += "out"
    group.add_argument("--where", type=condition, help=where)
    side = "shortest side in pixels of the images to encode; smaller images are left out"
    group.add_argument("--min_side", type=cli.positive_int, help=side)
    aspect = "largest ratio of the longer to the shorter side of the images to encode; others are left out"
    group.add_argument("--max_aspect", type=cli.positive_float, help=aspect)


def refuse_filter_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of add_filter_flags, hidden, as usage errors that say which script has them."""
    for name in FILTERS:
        group.add_argument(f"--{name}", action=_Refusal, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Refusal(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} is a flag of preprocess.py: filter with it, and train on its latents")


def chosen_filters(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of add_filter_flags that were passed, which decide the rows of a data set."""
    return {name: getattr(args, name) for name in FILTERS if getattr(args, name) is not None}


def condition(text: str) -> str:
    """Return a condition unchanged, as the type of a flag; raise ArgumentTypeError if it is not one."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from None
    for node in ast.walk(tree):
        is_value = isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str))
        if not (is_value or isinstance(node, (*COMPARISONS, *OTHERS))):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no condition: it may hold columns, numbers, strings, comparisons, and, or, not"
            )
    return text


def columns_of(text: str) -> list[str]:
    """Return the columns that a condition names, sorted."""
    return sorted({node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)})


def check_columns(text: str, schema: pa.Schema, place: str) -> None:
    """Raise BadInput unless a condition fits the columns of a table; place: its location."""
    missing = [name for name in columns_of(text) if name not in schema.names]
    if missing:
        raise BadInput(f"{place} has no column {missing[0]} of --where: its columns are {', '.join(schema.names)}")
    meets(text, schema.empty_table(), place)


def meets(text: str, table: pa.Table | pa.RecordBatch, place: str) -> list[bool]:
    """Return which rows of a table meet a condition; a comparison with a null decides nothing.

    Raises BadInput if the types of the columns do not fit.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        found = _evaluate(ast.parse(text, mode="eval").body, table)
        return pc.fill_null(pc.and_(found, True), False).to_pylist()
    except (pa.ArrowException, TypeError, AttributeError) as error:
        raise BadInput(f"--where {text!r} does not fit the columns of {place}: {error}") from None


def _evaluate(node: Any, table: Any) -> Any:
    """Return the values of a node of a condition: an array, or a number or string."""
    import pyarrow.compute as pc

    if isinstance(node, ast.Name):
        return table[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        value = _evaluate(node.operand, table)
        return pc.invert(value) if isinstance(node.op, ast.Not) else pc.negate(value)
    if isinstance(node, ast.BoolOp):
        combine = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
        return reduce(combine, [_evaluate(each, table) for each in node.values])
    values = [_evaluate(each, table) for each in (node.left, *node.comparators)]
    compared = [getattr(pc, COMPARISONS[type(op)])(*values[i : i + 2]) for i, op in enumerate(node.ops)]
    return reduce(pc.and_kleene, compared)
