"""Rules of the source that no linter has: sizes, no branch by family, nothing caught that is not named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rewriter", "passes", "runtime", "kernels")
FILES = sorted(
    [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    + [path for path in ROOT.glob("*.py") if path.name != "setup.py"]
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
BROAD = ("Exception", "BaseException")
BOUNDARIES = {
    "runtime/sampler.py": 1,  # a caller's own processor may raise anything: it ends that caller's request alone
    "runtime/text.py": 1,  # a tokenizer may raise anything as well: it ends the request whose tokens it was given
    "runtime/background.py": 1,  # the end of a thread: every waiter is told, and whoever comes later
}
"""Where everything is caught, how often, and why. Nothing is swallowed there: each is logged and told."""


def name_in_tree(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_file = pytest.mark.parametrize("path", FILES, ids=name_in_tree)
every_file_of_a_folder = pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent != ROOT], ids=name_in_tree
)


def test_there_is_something_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} >= {*FOLDERS, "__init__.py"}


@every_file
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    assert too_long_functions(path.read_text()) == []


@every_file_of_a_folder
def test_nothing_depends_on_a_family_or_class_name(path: Path) -> None:
    assert family_branches(path.read_text()) == []


@every_file
def test_nothing_is_caught_that_is_not_named(path: Path) -> None:
    assert len(broad_handlers(path.read_text())) == BOUNDARIES.get(name_in_tree(path), 0)


@pytest.mark.parametrize(
    "code",
    [
        "if config.model_type == 'llama': pass",
        "getattr(config, 'model_type')",
        "module.__class__.__name__",
        "type(module).__name__",
        "type(self.module).__qualname__",
    ],
)
def test_a_branch_by_family_would_be_found(code: str) -> None:
    assert family_branches(code)
    assert family_branches("f'{x!r} is a {type(x).__name__}'") == []


@pytest.mark.parametrize(
    "caught", ["", " Exception", " (ValueError, Exception)", " BaseException as e"]
)
def test_a_broad_handler_would_be_found(caught: str) -> None:
    assert broad_handlers(f"try:\n    f()\nexcept{caught}:\n    pass") == [3]
    assert broad_handlers("try:\n    f()\nexcept (KeyError, ValueError):\n    pass") == []
    assert broad_handlers(f"try:\n    f()\nexcept{caught}:\n    tidy()\n    raise") == []


def test_a_long_function_would_be_found() -> None:
    body = "    x = 1\n"
    assert too_long_functions("def f():\n" + body * MAX_FUNCTION_LINES) == []
    assert too_long_functions("def f():\n" + body * (MAX_FUNCTION_LINES + 1)) == ["f"]


def too_long_functions(text: str) -> list[str]:
    """Names of the functions whose body does not fit on a screen."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.body[0].lineno + 1 > MAX_FUNCTION_LINES
    ]


def family_branches(text: str) -> list[int]:
    """Lines that read a model's type or a class's name, but for texts written with it."""
    tree = ast.parse(text)
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    in_texts = {id(node) for text_node in texts for node in ast.walk(text_node)}
    return [
        node.lineno for node in ast.walk(tree) if _names_a_family(node) and id(node) not in in_texts
    ]


def _names_a_family(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return bool(node.value == "model_type")
    if not isinstance(node, ast.Attribute):
        return False
    if node.attr == "model_type":
        return True
    of = node.value
    of_class = isinstance(of, ast.Attribute) and of.attr == "__class__"
    of_type = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "type"
    if of_type and isinstance(of.args[0], ast.Name) and of.args[0].id == "error":
        return False  # what went wrong, for a message
    return node.attr in ("__name__", "__qualname__") and (of_class or of_type)


def broad_handlers(text: str) -> list[int]:
    """Lines of `except` clauses that catch everything and do not raise it again."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or any(name in BROAD for name in _caught(node.type)))
        and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None)
    ]


def _caught(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Tuple):
        return [name for element in node.elts for name in _caught(element)]
    return [node.id] if isinstance(node, ast.Name) else []
