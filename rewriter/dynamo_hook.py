"""Told where Dynamo's trace of a frame fails.

Dynamo calls a backend with the graph that it has traced. A frame that it gives up, as one in whose loop over layers a
graph breaks, no backend hears of: it is run as it is, and its layers are compiled one by one. So a failure is heard of
where it happens, by whoever asks for it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

FAILURES = (Unsupported, UserError, GuardOnDataDependentSymNode)
"""What Dynamo raises where it cannot go on. The last one, which the settings below may lead to, breaks no graph: it is
an error of the whole call.
"""

KEEPING_VALUES = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")
"""Settings of Dynamo, which names them where the lack of one breaks a graph."""


def in_place() -> Callable[..., Any]:
    """What Dynamo calls to trace into a function: (translator, function, args, kwargs, ...)."""
    return InstructionTranslatorBase.inline_user_function_return


def put_in_place(inline: Callable[..., Any]) -> None:
    """Have it call `inline`, which is to call what was in place before."""
    setattr(InstructionTranslatorBase, "inline_user_function_return", inline)  # noqa: B010 (a method)


def on_failure(told: Callable[[Any, BaseException], None]) -> None:
    """From now on, call `told(translator of the frame, error)` whenever a function that a frame calls cannot be traced.
    Whatever is compiled for another backend is for `told` to ignore.
    """
    plain = in_place()

    def inline(tx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(tx, *args, **kwargs)
        except FAILURES as error:
            if tx is tx.output.root_tx:
                told(tx, error)
            raise

    put_in_place(inline)


def lacking_settings(reason: str) -> dict[str, bool]:
    """Settings that may be all that Dynamo lacked where it broke a graph for this reason."""
    names = [name for name in KEEPING_VALUES if name in reason]
    return {name: True for name in names if not getattr(torch._dynamo.config, name)}
