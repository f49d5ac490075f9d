"""Whether kernels that are launched early keep to the order of the program that Inductor generated.

A kernel launched so may run while the one before it still does, until it calls `gdc_wait`. What it reads before that
must not be what the kernel before it writes; what lies further back is done, as every kernel waits before it lets the
next one start. Inductor places the waits by the names of buffers, and misses buffers that are written in place, and
kernels that read nothing. So its programs are read again: every call, what it touches too early, and what the call
before it wrote. What is not understood counts as writing everything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_WAIT = re.compile(r"^    tl\.extra\.cuda\.gdc_wait\(\)$", re.MULTILINE)
"""Where every program of a kernel comes by: not in a branch or a loop."""
_POINTER = re.compile(r"\w*_ptr\d*")
_STORE = re.compile(r"tl\.(?:store|atomic_\w+)\(")
_STORED = re.compile(_STORE.pattern + r"(\w*_ptr\d*)")
_WRITTEN = ("out_ptr", "in_out_ptr", "ws_ptr")

_HARMLESS = frozenset(
    "empty_strided_cuda empty_strided_cpu empty_strided reinterpret_tensor assert_size_stride assert_alignment"
    " get_raw_stream set_device _DeviceGuard clear size stride max min".split()
)
"""Functions of a generated program that launch nothing."""

_COPY = "copy_if_misaligned"
"""Its result is its argument, or a copy, which is launched the common way: it waits for everything before it."""


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel: its parameters in order, and of its pointers those touched before it waits, and written."""

    parameters: tuple[str, ...]
    early: frozenset[str]
    written: frozenset[str]


Written = frozenset[str] | None
"""Buffers that the last launch wrote; None for any."""


def keeps_order(source: str) -> bool:
    """Whether no kernel of a program reads or writes too early what the one before it may still write or read."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    kernels: dict[str, Kernel] = {}
    for name, text in _texts(tree):
        kernel = read_kernel(text)
        if kernel is None:
            return False
        kernels[name] = kernel
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return all(_Walk(kernels).takes(function.body) for function in functions)


def read_kernel(text: str) -> Kernel | None:
    """A kernel's source; None for one that is not understood, that may not wait, or that before it does writes or lets
    the next one start.
    """
    match = re.search(r"^def \w+\((.*?)\):$", text, re.MULTILINE | re.DOTALL)
    if match is None:
        return None
    parameters = tuple(part.split(":")[0].strip() for part in match[1].split(","))
    wait = _WAIT.search(text, match.end())
    if wait is None:
        return None
    before, behind = text[match.end() : wait.start()], text[wait.end() :]
    if "gdc_" in before or _STORE.search(before):
        return None
    written = {name for name in parameters if name.startswith(_WRITTEN)}
    written |= set(_STORED.findall(behind))
    return Kernel(parameters, frozenset(_POINTER.findall(before)), frozenset(written))


def _texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each Triton kernel's name in the program, and its source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call, target = node.value, node.targets[0]
            if ast.unparse(call.func) == "async_compile.triton" and isinstance(target, ast.Name):
                yield target.id, str(ast.literal_eval(call.args[1]))


class _Walk:
    """Goes through the statements of a function in order. `base` maps names to the buffers that they share memory with,
    `last` is what the last launch wrote.
    """

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.base: dict[str, str] = {}
        self.last: Written = None

    def takes(self, body: Sequence[ast.stmt]) -> bool:
        return all(self._takes(statement) for statement in body)

    def _takes(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.With):
            return self.takes(statement.body)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            kernel = self._launched(statement.value.func)
            if kernel is not None:
                return self._launch(kernel, statement.value.args)
        if isinstance(statement, ast.Assign):
            self._rename(statement)
        if not _is_harmless(statement):
            self.last = self._copied(statement)
        # A launch in a loop, say: what runs before it is not known.
        return not any(map(self._launched, ast.walk(statement)))

    def _copied(self, statement: ast.stmt) -> Written:
        """What may still be written behind a statement that is not harmless: by a copy at most one buffer more."""
        if self.last is None or not isinstance(statement, ast.Assign):
            return None
        value, target = statement.value, ast.unparse(statement.targets[0])
        is_copy = isinstance(value, ast.Call) and ast.unparse(value.func) == _COPY
        return self.last | {target} if is_copy else None

    def _launched(self, node: ast.AST) -> Kernel | None:
        """The kernel whose `run` this is."""
        if not isinstance(node, ast.Attribute) or node.attr != "run":
            return None
        return self.kernels.get(ast.unparse(node.value))

    def _launch(self, kernel: Kernel, arguments: Sequence[ast.expr]) -> bool:
        buffers = {
            name: self._buffer(argument) for name, argument in zip(kernel.parameters, arguments)
        }
        early = {buffers.get(name, "") for name in kernel.early}
        is_sound = not early or (self.last is not None and not early & (self.last | {""}))
        written = frozenset(buffers.get(name, "") for name in kernel.written)
        # What the caller holds may share memory under other names.
        is_known = all(name and not name.startswith("arg") for name in written)
        self.last = written if is_known else None
        return is_sound

    def _rename(self, statement: ast.Assign) -> None:
        buffer = self._buffer(statement.value)
        for target in statement.targets:
            if isinstance(target, ast.Name):
                self.base[target.id] = buffer or target.id

    def _buffer(self, value: ast.expr) -> str:
        """The buffer whose memory an expression names; empty if that is not seen."""
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor":
            value = value.args[0]
        if isinstance(value, ast.Subscript):
            value = value.value
        return self.base.get(value.id, value.id) if isinstance(value, ast.Name) else ""


def _is_harmless(statement: ast.stmt) -> bool:
    if not isinstance(statement, (ast.Assign, ast.Expr, ast.Delete, ast.Return, ast.Assert)):
        return False
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = {f.attr if isinstance(f, ast.Attribute) else ast.unparse(f) for f in calls}
    return names <= _HARMLESS
