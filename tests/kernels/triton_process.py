"""Triton kernels without a GPU: interpreted, or compiled for one that is not there, in a process of their own.

Triton decides when it is imported whether its kernels are interpreted, so a test process that may have imported it
already cannot. It starts a module that ends in `run_cases`; each outcome is printed as one line of JSON, [name, what
went wrong or ""].
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]

SHARED_MEMORY = 232448
"""Bytes a block may have on Hopper."""

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@functools.cache
def outcomes(module: str, interpreted: bool, begin: str = "") -> dict[str, str]:
    """Run the cases of `tests.kernels.<module>` whose names begin like this: name -> what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "TRITON_INTERPRET": str(int(interpreted)),
            "TRITON_CACHE_DIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.run(
            [sys.executable, "-m", f"tests.kernels.{module}", begin],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert process.returncode == 0, process.stderr
    return dict(json.loads(line) for line in process.stdout.splitlines())


def is_interpreted() -> bool:
    """Whether the process was started to interpret its kernels."""
    return os.environ["TRITON_INTERPRET"] == "1"


def run_cases(cases: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Run and print every case, of those whose names begin as the command line says."""
    torch.set_num_threads(1)
    begin = sys.argv[1] if sys.argv[1:] else ""
    for name, call in cases:
        if not name.startswith(begin):
            continue
        torch.manual_seed(0)
        problem = ""
        try:
            call()
        except Exception:  # noqa: BLE001  (reported, and the next one gets its turn)
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)


_ACCESS = re.compile(r"\b(?:ld|st|atom|red|cp)\.[\w.:]+")
_LOCAL = re.compile(r"(?:ld|st|atom|red)\..*(?:param|shared)|cp\..*prefetch")


def early_accesses(ptx: str) -> list[str]:
    """What a kernel's code for the card does to global memory before it waits for the kernel before it, and lets the
    next one start before that; "never waits" if it does not wait. A read of parameters or shared memory is none, nor
    is fetching into the cache.
    """
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        return ["never waits"]
    found = [name for name in _ACCESS.findall(before) if not _LOCAL.match(name)]
    return found + ["launch_dependents"] * ("griddepcontrol.launch" in before)


@contextmanager
def compiling(kernels: Mapping[ModuleType, Sequence[str]]) -> Iterator[None]:
    """While entered, these kernels are compiled for Hopper where they would be launched. One must be, at least."""
    compiled: list[Any] = []
    originals = [
        (module, n, getattr(module, n)) for module, names in kernels.items() for n in names
    ]
    for module, name, kernel in originals:
        setattr(module, name, _Compiler(kernel, compiled))
    try:
        yield
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)
    assert compiled


class _Compiler:
    """Stands for a kernel: `kernel[grid](...)` compiles it for these arguments."""

    def __init__(self, kernel: Any, compiled: list[Any]) -> None:
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        options = {n: kwargs.pop(n) for n in set(kwargs) - set(names)}
        values = dict(zip(names, args)) | kwargs
        if "DEPENDENT" in values:  # as `dependent` says on Hopper
            values["DEPENDENT"], options["launch_pdl"] = True, True
        constants: dict[tuple[int, ...], Any] = {}
        hints: dict[tuple[int, ...], Any] = {}
        signature = {
            name: _describe(
                values[name], (i,), self.kernel.params[i].is_constexpr, constants, hints
            )
            for i, name in enumerate(names)
        }
        source = ASTSource(self.kernel, signature, constants, hints)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert code.metadata.shared <= SHARED_MEMORY
        if values.get("DEPENDENT"):
            assert early_accesses(code.asm["ptx"]) == []
        self.compiled.append(code)


def _describe(value: Any, path: tuple[int, ...], fixed: bool, constants: Any, hints: Any) -> Any:
    """The type of a kernel's argument, as Triton would find it at a launch."""
    if fixed or value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    if isinstance(value, tuple):
        return tuple(_describe(x, (*path, i), fixed, constants, hints) for i, x in enumerate(value))
    if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
        hints[path] = [["tt.divisibility", 16]]
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"
