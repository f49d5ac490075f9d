"""Operators whose backward recomputes the forward and lets autograd differentiate it.

An operator is one function in plain torch. It becomes two: the forward, and a backward that runs the
function again on its saved inputs. Both are opaque to a compiler, so that neither the lengths of the
sequences nor loops over them are baked into a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]


def define(
    name: str,
    schema: str,
    function: Function,
    shape: Callable[..., Tensor],
    differentiated: Function | None = None,
) -> Callable:
    """Register `regraft::NAME` and `regraft::NAME_backward`; returns the forward.

    `schema` is the forward's, "(Tensor q, ...) -> Tensor". `function` computes it, functionally and
    in operations that autograd knows; `shape` is its fake: an empty tensor like the result. The
    gradient of every floating-point argument is that of `function`, or of `differentiated`, which
    computes the same in other operations.
    """
    forward = torch.library.custom_op(f"regraft::{name}", function, mutates_args=(), schema=schema)
    forward.register_fake(shape)
    arguments = schema[1 : schema.rindex(")")]
    backward = torch.library.custom_op(
        f"regraft::{name}_backward",
        _recomputed(differentiated or function),
        mutates_args=(),
        schema=f"(Tensor grad, bool[] needed, {arguments}) -> Tensor[]",
    )
    backward.register_fake(_gradient_shapes)
    forward.register_autograd(_distributed(backward), setup_context=_saved)
    return forward


def _recomputed(function: Function) -> Callable[..., list[Tensor]]:
    def run(grad: Tensor, needed: Sequence[bool], *args: Any) -> list[Tensor]:
        return recompute(function, grad, needed, args)

    return run


def recompute(
    function: Function, grad: Tensor, needed: Sequence[bool], args: Sequence[Any]
) -> list[Tensor]:
    """Gradients of `function(*args)` for the arguments that are `needed`, in their order.

    To be called in an operator's implementation. Raises RuntimeError where `function` keeps no history.
    """
    own = [_fresh(x, needs) for x, needs in zip(args, needed, strict=True)]
    wanted = [x for x, needs in zip(own, needed, strict=True) if needs]
    with _autograd(), torch.enable_grad():
        out = function(*own)
        if not out.requires_grad:
            raise RuntimeError("this operator has no backward: what it computes keeps no history")
        found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else _unaliased(g, grad)
        for g, x in zip(found, wanted, strict=True)
    ]


def _fresh(value: Any, needs: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(needs)


def _unaliased(found: Tensor, grad: Tensor) -> Tensor:
    """An operator must not return its argument."""
    same = found.untyped_storage()._cdata == grad.untyped_storage()._cdata
    return found.clone() if same else found


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Let autograd record inside an operator's implementation, where the dispatcher has passed it by."""
    key = torch._C.DispatchKey.AutogradFunctionality
    passed_by = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, passed_by)


def _gradient_shapes(grad: Tensor, needed: list[bool], *args: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x, needs in zip(args, needed, strict=True) if needs]


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.plain = tuple(None if isinstance(x, Tensor) else x for x in inputs)


def _distributed(backward: Callable[..., list[Tensor]]) -> Callable[..., tuple[Any, ...]]:
    def run(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inputs = [
            plain if tensor is None else tensor
            for plain, tensor in zip(ctx.plain, ctx.saved_tensors, strict=True)
        ]
        needed = list(ctx.needs_input_grad)
        found = iter(backward(grad, needed, *inputs))
        return tuple(next(found) if needs else None for needs in needed)

    return run
