"""From an exported program to one GraphModule whose weights are attributes and whose nodes carry their facts."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from .graph import TOKENS, CapturedGraph
from .sizes import Interval, simplify_size
from .wrapped_weights import find_weight, is_wrapper, reads_part

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def lift(
    program: ExportedProgram, holder: nn.Module, prefix: str, symbol: sympy.Symbol, where: Interval
) -> CapturedGraph:
    """The exported graph with `get_attr` nodes for its weights, which are the tensors that `holder` itself holds.

    `prefix` is the wrapper's part of every module path and weight name ("model."); `symbol` is export's symbol for
    the number of tokens, and `where` the interval in which the graph is right.

    What the forward writes into the model's own tensors is left out of the graph, which computes it afresh;
    `module.meta["writes"]` names those tensors.
    """
    held: dict[str, torch.Tensor] = {
        **dict(holder.named_buffers(remove_duplicate=False)),
        **dict(holder.named_parameters(remove_duplicate=False)),
        **{
            name: value
            for name, value in program.constants.items()
            if isinstance(value, torch.Tensor)
        },
    }
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    graph, copied = fx.Graph(), {}
    weights = _Weights(graph)

    for node in program.graph.nodes:
        spec = kinds.get(node.name) if node.op == "placeholder" else None
        if spec is not None and spec.kind in _WEIGHTS:
            full, tensor = find_weight(spec.target, held)
            copied[node] = weights.reader(node, full.removeprefix(prefix), tensor)
        elif reads_part(node) and copied[node.args[0]].op == "get_attr":
            copied[node] = weights.part(node, copied[node.args[0]], node.args[1])
        elif node.op == "output":
            graph.output(_user_outputs(program, node, copied))
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    weights.drop_wrappers()
    module = fx.GraphModule(weights.root, graph)
    module.meta["writes"] = _written_names(program, prefix)
    facts = _Facts(holder, prefix, symbol, where)
    for node in graph.nodes:
        facts.fill(node)
    high = None if where.high is None else int(where.high)  # not sympy's integers
    return CapturedGraph(module, weights.tensors, weights.names, int(where.low), high)


class _Weights:
    """The weights of a graph that is being built, as attributes of `root`, and one node for each that reads it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.root = nn.Module()
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[str, str] = {}
        self._graph = graph
        self._readers: dict[str, fx.Node] = {}

    def reader(self, node: fx.Node, full: str, tensor: torch.Tensor) -> fx.Node:
        """What takes the place of a node that holds the weight of this full name."""
        attribute = "w_" + re.sub(r"\W", "_", full)
        while self.names.get(attribute, full) != full:
            attribute += "_"
        if attribute not in self.tensors:
            _set(self.root, attribute, tensor)
            self.tensors[attribute], self.names[attribute] = tensor, full
            self._readers[attribute] = self._graph.get_attr(attribute)
            self._readers[attribute].meta = dict(node.meta)
        return self._readers[attribute]

    def part(self, node: fx.Node, whole: fx.Node, name: str) -> fx.Node:
        """What takes the place of a node that takes this tensor out of a wrapper."""
        attribute = str(whole.target)
        tensor = getattr(self.tensors[attribute], name)
        return self.reader(node, f"{self.names[attribute]}.{name}", tensor)

    def drop_wrappers(self) -> None:
        """Those of which the graph reads parts only."""
        for attribute, node in self._readers.items():
            if is_wrapper(self.tensors[attribute]) and not node.users:
                del self.tensors[attribute], self.names[attribute]
                self._graph.erase_node(node)


def _set(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(name, tensor)
    else:
        root.register_buffer(name, tensor)


def _user_outputs(
    program: ExportedProgram, node: fx.Node, copied: Mapping[fx.Node, fx.Node]
) -> tuple[fx.Node, ...]:
    """The user's outputs, without what the forward writes back into the model's own tensors."""
    specs = program.graph_signature.output_specs
    return tuple(
        copied[value]
        for spec, value in zip(specs, node.args[0], strict=True)
        if spec.kind == OutputKind.USER_OUTPUT
    )


def _written_names(program: ExportedProgram, prefix: str) -> tuple[str, ...]:
    """Names of the tensors of the model that the forward writes into."""
    specs = program.graph_signature.output_specs
    return tuple(
        (s.target or "").removeprefix(prefix) for s in specs if s.kind != OutputKind.USER_OUTPUT
    )


class _Facts:
    """Fills in shape, dtype, path and source of a node (see rewriter/graph.py).

    A node that holds one size (a SymInt) has `shape` and `dtype` None, and its value in TOKENS as `meta["size"]`.
    """

    def __init__(
        self, holder: nn.Module, prefix: str, symbol: sympy.Symbol, where: Interval
    ) -> None:
        self._prefix = prefix
        self._symbol = symbol
        self._where = where
        self._own_files = own_files(holder)

    def fill(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        node.meta.setdefault("path", self._path(node))
        node.meta.setdefault("source", self._source(node))
        node.meta["shape"] = node.meta["dtype"] = None
        if isinstance(value, torch.Tensor):
            node.meta["shape"] = tuple(self._size(size) for size in value.shape)
            node.meta["dtype"] = value.dtype
        elif isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            node.meta["size"] = sympy.sympify(self._size(value))

    def _size(self, size: int | torch.SymInt) -> int | sympy.Expr:
        if isinstance(size, int):
            return size
        simple = simplify_size(size.node.expr, self._symbol, self._where)
        return int(simple) if simple.is_Integer else simple.xreplace({self._symbol: TOKENS})

    def _path(self, node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return ""
        path = str(next(reversed(stack.values()))[0])
        return (path + ".").removeprefix(self._prefix).rstrip(".")

    def _source(self, node: fx.Node) -> str:
        frames = [
            match.groupdict() for match in _FRAME.finditer(node.meta.get("stack_trace") or "")
        ]
        own = [frame for frame in frames if frame["file"] in self._own_files]
        if not frames:
            return ""
        frame = (own or frames)[-1]
        return f"{os.path.basename(frame['file'])}:{frame['line']}: {frame['code'].strip()}"


def own_files(holder: nn.Module) -> set[str]:
    """The files that the model's classes are written in (not torch's, not this package's)."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = {_file_of(kind) for kind in {type(module) for module in holder.modules()}}
    torch_files = os.path.dirname(os.path.abspath(torch.__file__))
    return {
        f for f in files if not f.startswith((torch_files, os.path.join(package, "rewriter")))
    } - {""}


def _file_of(kind: type) -> str:
    try:
        return inspect.getfile(kind)
    except (OSError, TypeError):
        return ""
