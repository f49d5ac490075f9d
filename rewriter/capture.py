"""Capture: one forward pass of an unmodified model over a packed row, as a functional ATen graph."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import sympy
import torch
from torch import nn
from torch._guards import ShapeGuard
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .admit import admit, inner_model
from .aliases import taken_apart
from .errors import RewriteError, first_line
from .export import export
from .functional import functional
from .graph import CapturedGraph, shape_of
from .leaves import leaves_in_place
from .lift import lift, own_files
from .meta_twin import shapes_only
from .module_leaf import attach_calls
from .normal_form import normalize
from .opaque import OpaqueModules, Settings, Untraceable, example_row
from .sizes import Interval, guard_interval, missing_block
from .untouched import configs_of, untouched
from .watch import Watch
from .wrapped_weights import Carried

EXAMPLE_TOKENS = 37
"""Length of the traced row: odd and no multiple of a block size, so that no division comes out even by chance.

Where a guard counts blocks of which a row of this length has none, a longer one is traced: see TooFewTokens.
"""

_PREFIX = "model."


def takes_positions(model: nn.Module) -> bool:
    """Whether the model's forward has a `position_ids` argument."""
    return "position_ids" in inspect.signature(inner_model(model).forward).parameters


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Keywords of a forward pass that builds no cache; some models take `use_cache` through `**kwargs`."""
    accepted = inspect.signature(inner_model(model).forward).parameters.values()
    takes = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in accepted)
    return {"use_cache": False} if takes else {}


def capture(model: nn.Module) -> CapturedGraph:
    """Trace `model(input_ids, position_ids)` without a cache over one row of T tokens, T symbolic.

    What cannot be traced for every T becomes opaque: the functions of rewriter/leaves.py, and the smallest modules
    that fix T, guard on it beyond a lower and an upper bound, or branch on data (rewriter/module_leaf.py). The graph
    is in normal form. The model comes out untouched, also on an error; it may be on the meta device. Raises
    RewriteError if the model cannot be captured, with what to do about it.

    `module.meta["writes"]` names the weights that a forward pass both reads and writes. If there are any, the graph
    speaks for the model as it is now: a forward pass of the model's own (outside `borrowed`) changes them, and then
    the model has to be captured again.
    """
    admit(model)
    settings = implementations(model)
    with untouched(model), torch.no_grad():
        model.eval()
        row = _PackedRow(model, OpaqueModules(model, settings))
        with settings(model):
            program, symbol, where = _trace(row)
    captured = lift(program, row, _PREFIX, symbol, where)
    normalize(captured.module)
    attach_calls(captured.graph)
    _keep_writes_that_matter(captured)
    _check_logits(captured)
    return captured


class _PackedRow(nn.Module):
    """The traced call: `(input_ids [1, T], position_ids [1, T]) -> logits [1, T, vocab]`, no cache, no mask."""

    def __init__(self, model: nn.Module, opaque: OpaqueModules) -> None:
        super().__init__()
        self.model = model
        self._takes_positions = takes_positions(model)
        self._extra = without_cache(model)
        self.opaque = opaque
        self._carried = Carried.of(model)
        self.watch: Watch | None = None
        self.train(model.training)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        torch._check(input_ids.shape[1] == position_ids.shape[1])
        self._carried.give_back()
        self.opaque.starts(input_ids.shape[1])
        if self.watch is not None:
            self.watch.starts(input_ids.shape[1])  # type: ignore[arg-type]
        positions = {"position_ids": position_ids} if self._takes_positions else {}
        logits: torch.Tensor = self.model(input_ids=input_ids, **positions, **self._extra).logits
        return logits

    def run(self, length: int) -> torch.Tensor:
        """A real pass over a row of this length; on the meta device, one with fake tensors."""
        device = next(self.parameters()).device
        with shapes_only() if device.type == "meta" else contextlib.nullcontext():
            logits: torch.Tensor = self(*example_row(length, device))
        return logits


def implementations(model: nn.Module) -> Settings:
    """The implementations to trace `model` with: a context manager that selects them in a module of the model.

    Attention is sdpa if every class of the model allows it, else eager; experts are batched (row-local by algebra).
    """
    eager = any(getattr(module, "_supports_sdpa", True) is False for module in model.modules())
    chosen = {
        "_attn_implementation_internal": "eager" if eager else "sdpa",
        "_experts_implementation_internal": "batched_mm",
    }

    @contextlib.contextmanager
    def select(module: nn.Module) -> Iterator[None]:
        configs = configs_of(module)
        with untouched(module):
            for config in configs:
                vars(config).update(chosen)
                config.return_dict, config.use_cache = True, False
            yield

    return select


class TooFewTokens(Untraceable):
    """The traced row has none of the blocks of tokens that a guard counts; one of `tokens` has two."""

    def __init__(self, path: str, problem: str, source: str, tokens: int) -> None:
        super().__init__(path, problem, source)
        self.tokens = tokens


def _trace(row: _PackedRow) -> tuple[ExportedProgram, sympy.Symbol, Interval]:
    """Export, making opaque what stands in the way, until the program holds for an interval of T."""
    tokens, tried = EXAMPLE_TOKENS, set[tuple[str, int]]()
    while True:
        try:
            return _attempt(row, tokens)
        except Untraceable as reason:
            if isinstance(reason, TooFewTokens) and (reason.path, reason.tokens) not in tried:
                tried.add((reason.path, reason.tokens))
                tokens = reason.tokens
                continue
            if any(_related(reason.path, path) for path, _ in tried):
                tokens = EXAMPLE_TOKENS  # more of them were of no use
            row.opaque.add(reason)
            row.opaque.learn(row.run)


def _related(one: str, two: str) -> bool:
    """Whether one module is the other, or within it."""
    return f"{one}.".startswith(f"{two}.") or f"{two}.".startswith(f"{one}.")


def _attempt(row: _PackedRow, tokens: int) -> tuple[ExportedProgram, sympy.Symbol, Interval]:
    names = {id(vars(module)): name for name, module in row.model.named_modules()}

    def refuse_fixed(first: int, last: int) -> None:
        _interval(watch, first, last, tokens)

    row.watch = watch = Watch(names, refuse_fixed)
    try:
        with untouched(row), watch, leaves_in_place(row.model), row.opaque.in_place():
            program = _export(row, tokens)
    except (
        RuntimeError
    ) as error:  # what torch raises for data-dependent control flow, and what leaves raise
        path = watch.path_of_failure or _named_in(error, row.model)
        where_from = (path, first_line(error), _line_of(error, row))
        raise Untraceable(*where_from, why=_why(error)) from error
    finally:
        row.watch = None
    assert watch.symbol is not None and watch.shape_env is not None
    where = _interval(watch, 0, len(watch.shape_env.guards), tokens)
    with quiet():
        return functional(program, taken_apart()), watch.symbol, where


def _export(row: _PackedRow, tokens: int) -> ExportedProgram:
    device = next(row.parameters()).device
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    positions = torch.arange(tokens, device=device)[None]
    with quiet():
        return export(row, (ids, positions), ({1: Dim.AUTO}, {1: Dim.AUTO}))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Export explains at length what is read from its guards here, and prints the graph so far when it fails."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
            # `untouched` gives every attribute back as it was
            warnings.filterwarnings(
                "ignore", message="The tensor attribute.* assigned during export"
            )
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _interval(watch: Watch, first: int, last: int, tokens: int) -> Interval:
    """The interval around `tokens` where every guard on T of these numbers holds; Untraceable for one that fixes T."""
    assert watch.symbol is not None and watch.shape_env is not None
    symbol, guards = watch.symbol, watch.shape_env.guards
    where = Interval(2)  # export takes sizes 0 and 1 apart from all others
    for index in range(first, last):
        guard = guards[index]
        if guard.expr.free_symbols != {symbol} or about_layout(guard):
            continue
        interval = guard_interval(guard.expr, symbol, tokens)
        if interval is None:
            problem = f"it holds only where {guard.expr} (T is {symbol})"
            where_from = (watch.path_of_guard(index), problem, str(guard.sloc))
            block = missing_block(guard.expr, symbol, tokens)
            if block is not None:
                raise TooFewTokens(*where_from, tokens=2 * block + EXAMPLE_TOKENS)
            raise Untraceable(*where_from)
        where = where.meet(interval)
    return where


def about_layout(guard: ShapeGuard) -> bool:
    """Whether a guard only decided how torch lays a result out in memory, not what is in it.

    That is: whether a tensor is contiguous (and so whether it is copied), and along which dimensions `view` works its
    way ("not divisible yet, so take one more").
    """
    asked_by = str(guard.sloc)
    return "contiguous" in asked_by or (
        "_reshape_view_helper" in asked_by and isinstance(guard.expr, sympy.Ne)
    )


def _named_in(error: BaseException, model: nn.Module) -> str:
    """The module whose attribute export names, where only the finished trace is wrong; "" if it names none."""
    found = re.search(rf"model attribute: {re.escape(_PREFIX)}([\w.]+)\.\w+", str(error))
    return found[1] if found and found[1] in dict(model.named_modules()) else ""


def _line_of(error: BaseException, row: nn.Module) -> str:
    """The innermost line of the model's own code that an error passed through."""
    files = own_files(row)
    return _innermost(error, lambda file: file in files)


def _why(error: BaseException) -> str:
    """What is told of a branch whose outcome no trace can know; of anything else, the error says it."""
    if not isinstance(error, GuardOnDataDependentSymNode):
        return ""
    torch_itself, here = (str(Path(file).parent) for file in (torch.__file__, __file__))
    line = _innermost(error, lambda file: not file.startswith((torch_itself, here)))
    return f"it branches on numbers that depend on the tokens ({line})"


def _innermost(error: BaseException, wanted: Callable[[str], bool]) -> str:
    """The innermost line, in a wanted file, that an error passed through."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if wanted(frame.filename)
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}: {last.line}"


def _keep_writes_that_matter(captured: CapturedGraph) -> None:
    """A buffer that is only ever written makes no difference to the next pass."""
    read = {captured.weight_names[str(n.target)] for n in captured.graph.find_nodes(op="get_attr")}
    meta = captured.module.meta
    meta["writes"] = tuple(name for name in meta["writes"] if name in read)


def _check_logits(captured: CapturedGraph) -> None:
    (_, tokens) = shape_of(
        next(node for node in captured.graph.nodes if node.target == "input_ids")
    )
    shape = shape_of(captured.logits)
    if len(shape) != 3 or shape[:2] != (1, tokens):
        raise RewriteError(
            f"the model returns logits of shape {shape} for ids of shape (1, {tokens})",
            fix="only a model that returns one row of logits per input token can be served",
        )
