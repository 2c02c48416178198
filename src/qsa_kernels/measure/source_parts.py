"""Which part of the algorithm a place in the kernels' source belongs to."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import qsa_kernels

PARTS = ("decode", "scaling", "contraction", "softmax", "addressing", "unattributed")
KERNELS = Path(qsa_kernels.__file__).parent / "kernels"
PART_OF_FILE = {"decode.py": "decode", "paging.py": "addressing", "scaling.py": "scaling"}
SCALES = frozenset({"scale", "k_scale", "v_scale", "factor"})
# These only turn or split a tile: what the compiler places in them is the work of the call.
VIEWS = frozenset({"along_rows", "along_columns", "query_parts", "joined_parts"})
QUERIES = frozenset({"query", "queries"})
PLACES = frozenset({"k", "v", "k_places", "v_places", "page", "slot", "valid", "tile", "tiles"})
TILES = frozenset({"k", "v", "weighted"})


@dataclass(frozen=True)
class Frame:
    """A place in the source: file name, line (from 1) and column (from 0)."""

    file: str
    line: int
    column: int


def part_of(chain: Sequence[Frame], *, fused: bool = False, read: bool = False) -> str:
    """Part of the algorithm of an instruction, one of `PARTS`.

    The innermost place inside the kernels decides: helpers of Triton's own library, and those that only turn a tile,
    count for their caller. "decode" takes the casts to the operand type along, "addressing" the tile loads, the reads
    of what they left in shared memory, and the loop control.

    Args:
        chain (Sequence[Frame]): the inlined calls, innermost first.
        fused (bool): a multiply-add. The compiler joins equal operations of neighbouring statements and keeps one place
            for all; one that it places at an addition without a product belongs to the products of the contraction.
        read (bool): a read of shared memory, which decodes nothing wherever the compiler places it.
    """
    for frame in chain:
        if _syntax(frame.file) is not None and frame.line and _function(frame) not in VIEWS:
            part = _part(frame, fused)
            return "addressing" if read and part == "decode" else part
    return "unattributed"


@cache
def _function(frame: Frame) -> str:
    tree = _syntax(frame.file)
    assert tree is not None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.lineno <= frame.line <= (node.end_lineno or node.lineno):
            return node.name
    return ""


@cache
def _syntax(file: str) -> ast.Module | None:
    path = KERNELS / file
    return ast.parse(path.read_text()) if path.is_file() else None


@cache
def _part(frame: Frame, fused: bool) -> str:
    statement, operation = _locate(frame)
    names = {node.id for node in ast.walk(operation) if isinstance(node, ast.Name)} if operation else set()
    call = _called(operation)
    if isinstance(operation, ast.BinOp) and isinstance(operation.op, ast.Mult) and names & SCALES:
        return "scaling"
    if frame.file in PART_OF_FILE:
        return PART_OF_FILE[frame.file]
    if (
        fused
        and isinstance(operation, ast.BinOp)
        and not any(isinstance(node, ast.Mult) for node in ast.walk(operation))
    ):
        return "contraction"
    if call == "dot" or (isinstance(statement, ast.Assign) and _targets(statement) & QUERIES):
        return "contraction"
    if call == "load" or not isinstance(statement, ast.Assign) or _targets(statement) & PLACES:
        return "addressing"
    if names & TILES and "decay" not in names:
        return "contraction"
    return "softmax"


def _locate(frame: Frame) -> tuple[ast.stmt | None, ast.expr | None]:
    """The innermost statement at a place, and the operation that the compiler places there.

    Triton gives an operation the place of its last operand.
    """
    tree = _syntax(frame.file)
    assert tree is not None
    statement = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= frame.line <= (node.end_lineno or node.lineno):
            statement = node
    if statement is None:
        return None, None
    for node in ast.walk(statement):
        for operand in _last_operand(node):
            if (operand.lineno, operand.col_offset) == (frame.line, frame.column) and isinstance(node, ast.expr):
                return statement, node
    return statement, None


def _last_operand(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call):
        yield node.args[-1] if node.args else node.func
    elif isinstance(node, ast.BinOp):
        yield node.right
    elif isinstance(node, ast.Compare):
        yield node.comparators[-1]
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Subscript):
        yield node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice


def _called(operation: ast.expr | None) -> str:
    if isinstance(operation, ast.Call) and isinstance(operation.func, ast.Attribute):
        return operation.func.attr
    return ""


def _targets(statement: ast.Assign) -> set[str]:
    return {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
