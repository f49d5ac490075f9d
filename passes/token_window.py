"""A value of each token that depends on the last few token ids alone -> the same computation over windows of ids.

    before   f(input_ids [1, T]) -> [1, T, ...], in any spelling: n-gram hashes, shifts up to a separator
    after    windows = regraft.causal_window(ids, W + 1, state);  f of each window [1, W + 1], its last token's value

The last W ids are the request's state. How far back f looks, and which id stands for "before the first token", is
measured on texts rich in the ids that f may compare with (numbers in its code, their neighbours, whole numbers that it
stores): f of a text must be f of its windows, exactly. The report says that this was measured and not proven.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from regraft.kernels.causal_conv import causal_window
from regraft.rewriter.errors import first_line
from regraft.rewriter.graph import TOKENS, is_aten, shape_of
from regraft.rewriter.leaf_trace import MODULE, LeafTrace, trace_leaf
from regraft.rewriter.leaves import LeafUnsupported
from regraft.rewriter.module_leaf import ModuleCall, Slot
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region
from regraft.rewriter.replay import extract

from .leaf_copy import copy_leaf
from .leaf_rows import own_state, sequences

aten = torch.ops.aten

FARTHEST = 16
"""Tokens that a window may reach back."""

TEXTS = ((0, 64), (1, 64), (2, 5000))
"""Seeds and lengths of the texts of the measurement."""

LARGEST_ID = 8
"""Ids of these texts are below, but for those that the function may know."""

MOST_STORED = 64
"""A stored tensor of more whole numbers is a table, not what ids are compared with."""

TOKENS_TRACED = 7
RESIZED = ("expand", "view", "reshape", "_unsafe_view")
"""Operations that are told the sizes of their result."""


@dataclass(frozen=True)
class Found:
    """The region as a function of token ids."""

    region: Region
    function: _OfIds
    weights: tuple[fx.Node, ...]
    named: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How far back the function looks, and what it is of windows."""

    found: Found
    reach: int
    before: int
    trace: LeafTrace


class _OfIds(nn.Module):
    """The region's subgraph as a function of ids [n], or of each of several windows."""

    def __init__(self, subgraph: fx.GraphModule, weights: list[Tensor]) -> None:
        super().__init__()
        self.subgraph = subgraph
        self.count = len(weights)
        for i, tensor in enumerate(weights):
            self.register_buffer(f"w{i}", tensor.detach())

    def of_text(self, ids: Tensor) -> Tensor:
        """[n] -> [n, ...]."""
        result: Tensor = self.subgraph(ids.shape[0], ids[None], *self.weights)
        return result[0]

    def forward(self, windows: Tensor) -> Tensor:
        """[n, W + 1] -> [n, ...], of each window's last token."""
        batched = _Batched(self.subgraph, windows.shape[0])
        result: Tensor = batched.run(windows.shape[1], windows, *self.weights)
        return result[:, -1]

    @property
    def weights(self) -> list[Tensor]:
        return [self.get_buffer(f"w{i}") for i in range(self.count)]


class _Batched(fx.Interpreter):
    """Runs a graph of a batch of one over several rows. What it makes of them is measured (see `_reach`)."""

    def __init__(self, module: fx.GraphModule, rows: int) -> None:
        super().__init__(module)
        self._rows = rows
        (_, ids, *_) = module.graph.find_nodes(op="placeholder")
        self._many = {ids}
        for node in module.graph.nodes:
            if any(operand in self._many for operand in node.all_input_nodes):
                self._many.add(node)

    def run_node(self, n: fx.Node) -> Any:
        """One row for each is one for all, repeated where an operation does not do so by itself."""
        self._is_many = n in self._many
        result = super().run_node(n)
        together = [user for user in n.users if is_aten(user, "cat", "gather")]
        if isinstance(result, Tensor) and n not in self._many and self._many.intersection(together):
            return result.expand(self._rows, *result.shape[1:])
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "_opname", "")
        if self._is_many and name in RESIZED and args[1][0] == 1:
            args = (args[0], [self._rows, *args[1][1:]])
        return super().call_function(target, args, kwargs)


def pattern(region: Region) -> Found | Declined:
    """A region that reads token ids and nothing else that depends on tokens, and gives a row per token."""
    closer = region.closer
    if [node.target for node in region.inputs] != ["input_ids"]:
        return Declined("not a function of token ids alone", closer)
    if shape_of(closer)[:2] != (1, TOKENS) or TOKENS in shape_of(closer)[2:]:
        return Declined("not one row per token", closer, 0.2)
    owner = closer.graph.owning_module
    assert owner is not None
    subgraph, weights = extract(closer, region.nodes, region.inputs)
    tensors = [getattr(owner, str(node.target)) for node in weights]
    named = {
        number for node in region.nodes for number in (*node.args, *node.kwargs.values())
        if type(number) is int and number >= 0
    }  # fmt: skip
    return Found(region, _OfIds(subgraph, tensors), tuple(weights), tuple(sorted(named)))


def check(found: Found) -> Plan | Declined:
    """The function of a text is the function of its windows."""
    closer = found.region.closer
    if any(tensor.is_meta for tensor in found.function.buffers()):
        return Declined("how far back the tokens count is measured: weights needed", closer, 0.5)
    try:
        reach = _reach(found)
        if reach is None:
            return Declined(f"more than the last {FARTHEST} tokens count", closer, 0.5)
        trace = _trace(found, reach[0])
    except LeafUnsupported as problem:
        return Declined(str(problem), closer, 0.6)
    return Plan(found, *reach, trace)


@torch.no_grad()
def _reach(found: Found) -> tuple[int, int] | None:
    """The fewest earlier tokens that do, and the id that stands before the first."""
    device = next((b.device for b in found.function.buffers()), torch.device("cpu"))
    texts = []
    for seed, length in TEXTS:
        random = torch.Generator().manual_seed(seed)
        often = torch.tensor([*_known_ids(found), *range(LARGEST_ID)])
        texts.append(often[torch.randint(len(often), (length,), generator=random)].to(device))
    try:
        expected = [found.function.of_text(text) for text in texts]
        found.function(windows_of(texts[0], 1, 0))
    except (
        RuntimeError,
        IndexError,
    ) as problem:  # what a shape or an id out of a table's range can cause
        raise LeafUnsupported(
            f"does not run over windows of ids: {first_line(problem)}"
        ) from problem
    for reach in range(1, FARTHEST + 1):
        for before in found.named or (0,):
            if all(
                torch.equal(found.function(windows_of(text, reach, before)), values)
                for text, values in zip(texts, expected)
            ):
                return reach, before
    return None


def _known_ids(found: Found) -> list[int]:
    """Ids that the function may treat unlike others: on either side of a threshold, too."""
    stored = [
        number for tensor in found.function.buffers()
        if not tensor.is_floating_point() and tensor.numel() <= MOST_STORED
        for number in tensor.flatten().tolist()
    ]  # fmt: skip
    near = {number + step for number in (*found.named, *stored) for step in (-1, 0, 1)}
    return sorted(number for number in near if number >= 0)


def windows_of(text: Tensor, reach: int, before: int) -> Tensor:
    """[n] -> [n, reach + 1]."""
    return torch.cat([text.new_full((reach,), before), text]).unfold(0, reach + 1, 1)


def _trace(found: Found, reach: int) -> LeafTrace:
    """The function of windows as a graph."""
    windows = fx.Graph().placeholder("windows")
    windows.meta.update(shape=(TOKENS, reach + 1), dtype=torch.int64)
    function = found.function
    call = ModuleCall(
        key="", path=found.region.path, module=function, forward=function.forward,
        settings=lambda module: contextlib.nullcontext(), arguments=(Slot.TENSOR,),
        argument_spec=pytree.tree_structure(((0,), {})), results=(),
        result_spec=pytree.tree_structure(0), tokens_at=None,
    )  # fmt: skip
    return trace_leaf(call, (windows,), 0, TOKENS_TRACED)


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Windows of ids from the operator, the function over them, and the batch of one back."""
    found, reach = plan.found, plan.reach
    closer, ids = found.region.closer, grafting.inputs["input_ids"]
    row = grafting.call(aten.select.int, ids, 0, 0, shape=(TOKENS,), dtype=torch.int64)
    row = grafting.call(aten.unsqueeze.default, row, 1, shape=(TOKENS, 1), dtype=torch.int64)
    # a sequence starts from zeros
    row = grafting.call(aten.sub.Tensor, row, plan.before, shape=(TOKENS, 1), dtype=torch.int64)
    windows = grafting.call(
        causal_window._opoverload, row, reach + 1, 1,
        own_state(grafting, "ids", (1, reach), torch.int64), *sequences(grafting),
        shape=(TOKENS, 1, reach + 1), dtype=torch.int64,
    )  # fmt: skip
    shape = (TOKENS, reach + 1)
    windows = grafting.call(aten.select.int, windows, 1, 0, shape=shape, dtype=torch.int64)
    windows = grafting.call(aten.add.Tensor, windows, plan.before, shape=shape, dtype=torch.int64)
    inputs = _inputs(plan, windows, ids)
    result = copy_leaf(plan.trace, None, found.region.path, inputs, grafting)
    whole = grafting.call(
        aten.unsqueeze.default, result, 0, shape=shape_of(closer), dtype=closer.meta["dtype"]
    )
    grafting.replace(closer, whole)
    grafting.notes.append(
        f"the last {reach} token ids count, {plan.before} before the first: measured, not proven"
    )


def _inputs(plan: Plan, windows: fx.Node, ids: fx.Node) -> dict[fx.Node, fx.Node]:
    """What stands in the model's graph for each input and weight of the function's."""
    captured, weights = plan.trace.captured, plan.found.weights
    names = {f"{MODULE}w{i}": node for i, node in enumerate(weights)}
    found: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        target: Any = str(node.target)
        if node.op == "placeholder":
            found[node] = windows if target == plan.trace.others[0] else ids
        elif node.op == "get_attr" and captured.weight_names.get(target) in names:
            found[node] = names[captured.weight_names[target]]
    return found


PASS = Pass(
    "token_window",
    kind="token window",
    operator="regraft::causal_window",
    pattern=pattern,
    check=check,
    rewrite=rewrite,
)
