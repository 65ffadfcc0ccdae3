"""The lines of the package breathe: how much each one holds, by syntax, has a limit.

The limits are near what libraries known for their code have (FlowJAX 10.3 nodes per line of a
function's body, Zuko 10.3, Keras 6.8). Whoever passes one gives an intermediate value a name, or a
part of a function a function of its own; a formatter does not help.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.once

PACKAGE = Path(__file__).parents[2] / "tfp_ibnn"
ROOMS = sorted(path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")

NODES_OF_A_ROOM = 11.0  # per line, in the mean
NODES_OF_A_FUNCTION = 16.0  # per line, of functions of `FEW_LINES` or more
FEW_LINES = 8
LONGEST = 40  # lines of a function's body
PACKED = 4  # assignments `a, b = x, y` per 1,000 lines
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Body(NamedTuple):
    """The body of a function, less its docstring."""

    where: str
    nodes: int
    lines: int


def docstring_of(node):
    """Return the statement that is the docstring of a module, class or function, or None."""
    first = node.body[0] if node.body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


def lines_of_code(text, tree):
    """Return the numbers of lines that are neither blank nor comment nor docstring."""
    numbers = set()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.strip().startswith("#"):
            numbers.add(number)
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
            docstring = docstring_of(node)
            if docstring is not None:
                numbers -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return numbers


def bodies(tree, code, name=""):
    """Return the bodies of the functions of a module that are inside of no other function."""
    inner = set()
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTIONS) or node in inner:
            continue
        inner |= {child for child in ast.walk(node) if child is not node}
        body = node.body[1:] if docstring_of(node) else node.body
        if not body:
            continue
        nodes = sum(1 for part in body for _ in ast.walk(part))
        lines = len(code & set(range(body[0].lineno, body[-1].end_lineno + 1)))
        yield Body(f"{name}:{node.lineno} {node.name}", nodes, max(lines, 1))


def parsed(folder):
    """Return name, syntax tree and lines of code of each file in a folder."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        yield path.relative_to(PACKAGE).as_posix(), tree, lines_of_code(text, tree)


def found_in(folder):
    return [body for name, tree, code in parsed(folder) for body in bodies(tree, code, name)]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_the_lines_of_a_room_are_not_pressed(room):
    found = found_in(room)
    mean = sum(body.nodes for body in found) / sum(body.lines for body in found)
    assert mean <= NODES_OF_A_ROOM


def test_no_function_is_dense():
    long_enough = [body for body in found_in(PACKAGE) if body.lines >= FEW_LINES]
    assert [x for x in long_enough if x.nodes / x.lines > NODES_OF_A_FUNCTION] == []


def test_no_function_is_long():
    assert [body for body in found_in(PACKAGE) if body.lines > LONGEST] == []


def test_few_assignments_are_packed():
    packed = lines = 0
    for _, tree, code in parsed(PACKAGE):
        lines += len(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                packed += isinstance(node.targets[0], ast.Tuple)
    assert 1000 * packed / lines <= PACKED


def messages(tree):
    """Return the errors whose message is put together from variables that hold text."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            if is_text or isinstance(node.value, ast.JoinedStr):
                names |= {x.id for x in node.targets if isinstance(x, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            used = {x.id for x in ast.walk(node.exc.args[0]) if isinstance(x, ast.Name)}
            yield node.lineno, bool(used & names)


def test_a_message_is_one_literal():
    found = [built for _, tree, _ in parsed(PACKAGE) for _, built in messages(tree)]
    assert sum(found) <= 0.05 * len(found)


def test_what_is_measured_is_seen():
    text = (
        'def f(x):\n    """Text."""\n    # why\n    a, b = x, 1\n\n    what = "no"\n'
        "    raise ValueError(f'{what} {a}')\n"
    )
    tree = ast.parse(text)
    code = lines_of_code(text, tree)
    assert code == {1, 4, 6, 7}
    (body,) = bodies(tree, code)
    assert (body.lines, body.where) == (3, ":1 f")
    assert body.nodes > 15
    assert list(messages(tree)) == [(7, True)]
