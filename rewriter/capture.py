"""Capture: one forward pass of an unmodified model over a packed row, as a functional ATen graph."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from .errors import RewriteError
from .graph import CapturedGraph
from .leaves import leaves_in_place
from .lift import lift
from .normal_form import normalize
from .sizes import Interval, guard_interval
from .untouched import configs_of, untouched

EXAMPLE_TOKENS = 37
"""Length of the traced row: odd and no multiple of a block size, so that no division comes out even by chance."""

_PREFIX = "model."


def capture(model: nn.Module) -> CapturedGraph:
    """Trace `model(input_ids, position_ids)` without a cache over one row of T tokens, T symbolic.

    The model comes out untouched, also on an error. Works on the meta device. Raises RewriteError if the model cannot
    be traced, or only for fixed numbers of tokens.
    """
    with untouched(model), traceable(model), leaves_in_place(model), torch.no_grad():
        row = _PackedRow(model)
        program = _export(row)
        symbol, where = _token_range(program)
        program = program.run_decompositions({})
    captured = lift(program, row, _PREFIX, symbol, where)
    normalize(captured.module)
    return captured


class _PackedRow(nn.Module):
    """The traced call: `(input_ids [1, T], position_ids [1, T]) -> logits [1, T, vocab]`, no cache, no mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        accepted = accepted_arguments(model)
        self._takes_positions = "position_ids" in accepted
        self._extra = {"use_cache": False} if "use_cache" in accepted else {}
        self.train(model.training)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        torch._check(input_ids.shape[1] == position_ids.shape[1])
        positions = {"position_ids": position_ids} if self._takes_positions else {}
        return self.model(input_ids=input_ids, **positions, **self._extra).logits


def accepted_arguments(model: nn.Module) -> set[str]:
    """Names that the model's forward takes (of the model inside, where an adapter passes everything through)."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(inner.forward).parameters)


@contextlib.contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Select the traceable implementations for the time of a capture: sdpa (or eager) and batched experts."""
    refusing = {
        id(module.config)
        for module in model.modules()
        if hasattr(module, "_supports_sdpa") and not module._supports_sdpa
    }
    configs = configs_of(model)
    for config in configs:
        config._attn_implementation_internal = "eager" if refusing else "sdpa"
        config._experts_implementation_internal = "batched_mm"
        if hasattr(config, "return_dict"):
            config.return_dict = True
    with sdpa_kernel(SDPBackend.MATH), _quiet():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export explains at length what Regraft reads from the guards."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
            yield
    finally:
        logger.setLevel(level)


def _export(row: _PackedRow) -> ExportedProgram:
    device = next(row.parameters()).device
    ids = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long, device=device)
    positions = torch.arange(EXAMPLE_TOKENS, device=device)[None]
    return torch.export.export(
        row, (ids, positions), dynamic_shapes=({1: Dim.AUTO}, {1: Dim.AUTO}), strict=False
    )


def _token_range(program: ExportedProgram) -> tuple[sympy.Symbol, Interval]:
    """Export's symbol for T, and the interval in which every guard on it holds."""
    ids = next(node for node in program.graph.nodes if node.name == "input_ids")
    tokens: Any = ids.meta["val"].shape[1]
    if isinstance(tokens, int):
        raise RewriteError(f"the trace holds for exactly {tokens} tokens")
    symbol = tokens.node.expr
    where = Interval(2)
    for constraint in (program.range_constraints.get(symbol),):
        if constraint is not None:
            where = where.meet(Interval(int(constraint.lower), None if constraint.upper > (1 << 40) else int(constraint.upper)))
    for guard in ids.meta["val"].fake_mode.shape_env.guards:
        if guard.expr.free_symbols != {symbol}:
            continue
        interval = guard_interval(guard.expr, symbol, EXAMPLE_TOKENS)
        if interval is None:
            raise RewriteError(
                f"the trace holds only where {guard.expr} (T = {symbol})", source=str(guard.sloc)
            )
        where = where.meet(interval)
    return symbol, where
