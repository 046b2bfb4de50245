"""Small changes to Python source, made on its syntax tree.

Some code is excluded, because a change there does not affect the core's decisions: docstrings, annotations, assertions,
the `validate` methods (checks themselves), raised errors, field defaults, texts, and story notes. Named constants are
also excluded, because they are promises and checks use them by name.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SIGNS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_EXTREMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NOT_DECISIONS = ("note", "validate")
"""Calls to these functions are not changed."""

Change = Callable[[ast.AST], ast.AST]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one module."""

    kind: str
    line: int
    before: str
    """First line of the changed statement."""
    after: str


@dataclass(frozen=True, slots=True)
class _Place:
    """A node that may be changed, with its position in the tree."""

    node: ast.stmt | ast.expr
    parent: ast.AST
    field: str
    index: int | None
    """Index within the field, if the field is a list."""
    statement: ast.stmt
    """The smallest statement that contains the node, or the node itself."""


def mutations(source: str) -> list[Mutation]:
    """Return every mutation of a module."""
    tree = ast.parse(source)
    return [mutation for mutation, undo in _mutated(tree) if undo()]


def mutant(source: str, number: int) -> str:
    """Return the module source after mutation `number`, in the order of `mutations`."""
    tree = ast.parse(source)
    for count, (_, undo) in enumerate(_mutated(tree)):
        if count == number:
            return ast.unparse(ast.fix_missing_locations(tree))
        undo()
    raise IndexError(number)


def _mutated(tree: ast.Module) -> Iterator[tuple[Mutation, Callable[[], bool]]]:
    """Apply each change to the tree in turn. The caller reverts it before the next."""
    for place in list(_places(tree, None)):
        node, statement = place.node, place.statement
        for kind, change in _changes(node):
            before = _head(statement)
            changed = ast.copy_location(change(copy.deepcopy(node)), node)
            _put(place, changed)
            after = _head(changed if statement is node else statement)
            yield Mutation(kind, node.lineno, before, after), partial(_put, place, node)


def _places(node: ast.AST, statement: ast.stmt | None) -> Iterator[_Place]:
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_left_alone(child, node, field):
                continue
            inner = child if isinstance(child, ast.stmt) else statement
            if isinstance(child, ast.stmt | ast.expr) and inner is not None:
                yield _Place(child, node, field, index, inner)
            yield from _places(child, inner)


def _is_left_alone(node: ast.AST, parent: ast.AST, name: str) -> bool:
    if name in ("annotation", "returns", "decorator_list", "bases") or isinstance(node, ast.Assert | ast.Raise):
        return True
    if isinstance(parent, ast.ClassDef) and isinstance(node, ast.Assign | ast.AnnAssign):
        return True
    if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in _NOT_DECISIONS:
        return True
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _NOT_DECISIONS


def _changes(node: ast.stmt | ast.expr) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.Compare(ops=[ast.cmpop() as comparison]) if type(comparison) in _OPPOSITES:
            yield "comparison", lambda n: _with(n, ops=[_OPPOSITES[type(comparison)]()])
        case ast.BoolOp(op=connective):
            other = ast.Or() if isinstance(connective, ast.And) else ast.And()
            yield "and/or", lambda n: _with(n, op=other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negation", lambda n: operand
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            yield "negation", lambda n: operand
        case ast.BinOp(op=ast.operator() as operator) if type(operator) in _SIGNS:
            yield "sign", lambda n: _with(n, op=_SIGNS[type(operator)]())
        case ast.Constant(value=bool() as value):
            yield "constant", lambda n: ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "constant", lambda n: ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield "constant", lambda n: ast.Constant(2 * value + 1)
        case ast.Call(func=ast.Name(id=called)) if called in _EXTREMES:
            yield "min/max", lambda n: _with(n, func=ast.Name(_EXTREMES[called], ast.Load()))
        case ast.Expr() | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Return(value=None):
            yield "removed", lambda n: ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "removed", lambda n: ast.Pass()
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
        yield "negated test", lambda n: _with(n, test=ast.UnaryOp(ast.Not(), getattr(n, "test")))  # noqa: B009


def _with(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _put(place: _Place, node: ast.AST) -> bool:
    if place.index is None:
        setattr(place.parent, place.field, node)
    else:
        getattr(place.parent, place.field)[place.index] = node
    return True


def _head(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0].strip()
