"""Every kernel that is launched while the one before it ends waits for it before it reads or writes memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kernels.triton_process import early_accesses

KERNELS = Path(__file__).parents[2] / "kernels"

TOUCHES = {"load", "store", "atomic_add"}
"""Of Triton's language and of descriptors."""

HARMLESS = {"prefetch"}
"""Functions of the repository that touch no memory that somebody writes."""


def early_calls(kernel: ast.FunctionDef) -> list[str]:
    """What a kernel calls before it waits and should not; its name alone if it never waits."""
    found: list[str] = []
    for statement in kernel.body:
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        methods = [c.func.attr for c in calls if isinstance(c.func, ast.Attribute)]
        functions = [c.func.id for c in calls if isinstance(c.func, ast.Name)]
        if "wait_for_last" in functions:
            return found
        found += [name for name in methods if name in TOUCHES]
        found += [name for name in functions if name not in HARMLESS]
    return [kernel.name]


def dependent_kernels(source: str) -> list[ast.FunctionDef]:
    """The functions that are told whether they are launched so, by the parameter DEPENDENT."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    return [f for f in functions if f.name.endswith("_kernel") and "DEPENDENT" in names_of(f)]


def names_of(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


SOURCES = {str(path.relative_to(KERNELS)): path.read_text() for path in KERNELS.rglob("*.py")}


@pytest.mark.parametrize(
    "name", sorted(name for name, source in SOURCES.items() if dependent_kernels(source))
)
def test_waits_first(name: str) -> None:
    for kernel in dependent_kernels(SOURCES[name]):
        assert early_calls(kernel) == [], kernel.name


def test_all_but_those_that_choose_tokens_are_launched_so() -> None:
    kernels = {
        function.name
        for source in SOURCES.values()
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_kernel")
    }
    dependent = {f.name for source in SOURCES.values() for f in dependent_kernels(source)}
    assert kernels - dependent == {"part_kernel", "row_kernel", "draw_kernel"}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("    wait_for_last(DEPENDENT)\n    tl.load(x)", []),
        ("    tl.load(x)\n    wait_for_last(DEPENDENT)", ["load"]),
        ("    own_sequence(x)\n    wait_for_last(DEPENDENT)", ["own_sequence"]),
        ("    tl.store(x, 1)", ["a_kernel"]),
    ],
)
def test_an_early_access_is_noticed(body: str, found: list[str]) -> None:
    (kernel,) = dependent_kernels(f"def a_kernel(x, DEPENDENT):\n{body}\n")
    assert early_calls(kernel) == found


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("ld.param.b64 %rd1, [x]; prefetch.global.L2 [%rd1]; st.shared.b32 [%r1], %r2;", []),
        ("ld.global.b32 {%r1}, [%rd1];", ["ld.global.b32"]),
        ("@%p1 st.global.v4.b32 [%rd1], %r2;", ["st.global.v4.b32"]),
        ("cp.async.bulk.shared::cta.global [%r1], [%rd1], 64;", ["cp.async.bulk.shared::cta.global"]),
        ("griddepcontrol.launch_dependents;", ["launch_dependents"]),
    ],
)  # fmt: skip
def test_an_early_access_of_compiled_code_is_noticed(before: str, found: list[str]) -> None:
    assert early_accesses(f"{before} griddepcontrol.wait; ld.global.b32 %r1, [%rd1];") == found
    assert early_accesses(before) == ["never waits"]
