"""Leaves: functions that loop over chunks or time in Python, kept whole as one operator while a model is traced.

transformers marks these functions with a name that all families share (the name of the kernel that could replace
them). A leaf is keyed by that name and by nothing else; its operator takes the function's own arguments, so that the
captured graph says what is computed and still runs as it is, on the original torch function.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from regraft.kernels.varlen.differentiable import define

_DECORATOR = "use_kernel_func_from_hub_with_fallback"


class LeafUnsupported(RuntimeError):
    """A call that the leaf's operator cannot express: an argument it has no place for."""


@dataclass(frozen=True)
class Leaf:
    """The operator `regraft::leaf_NAME` for one kernel name.

    `schema` lists the function's arguments by their own names. `output_like` names the argument that the output has
    the shape of, `dtype_like` the one it has the dtype of. `final_state_argument` asks for the final state beside the
    output, which the operator does not give (a trace without a cache needs none); with `returns_pair` the function
    then returns `(output, None)`.
    """

    name: str
    schema: str
    output_like: str
    dtype_like: str
    final_state_argument: str = ""
    returns_pair: bool = False

    @property
    def operator_name(self) -> str:
        return f"regraft::leaf_{self.name}"

    @property
    def operator(self) -> Callable[..., torch.Tensor]:
        """The operator; its last argument, `function`, names the torch function that it runs."""
        return getattr(torch.ops.regraft, f"leaf_{self.name}").default


LEAVES: dict[str, Leaf] = {
    leaf.name: leaf
    for leaf in (
        Leaf(
            # hidden_states [B, C, T], weight [C, K], bias [C] -> [B, C, T]
            "causal_conv1d_fn",
            "(Tensor hidden_states, Tensor weight, Tensor? bias, str? activation, str function) -> Tensor",
            output_like="hidden_states",
            dtype_like="hidden_states",
        ),
        Leaf(
            # query, key [B, T, Hk, K], value [B, T, Hv, V], g, beta [B, T, Hv] -> [B, T, Hv, V]
            "chunk_gated_delta_rule",
            "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, int chunk_size, Tensor? initial_state, "
            "bool output_final_state, bool use_qk_l2norm_in_kernel, str function) -> Tensor",
            output_like="value",
            dtype_like="query",
            final_state_argument="output_final_state",
            returns_pair=True,
        ),
        Leaf(
            # query, key, g [B, T, H, K], value [B, T, H, V], beta [B, T, H] -> [B, T, H, V]
            "chunk_kda",
            "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, int chunk_size, Tensor? initial_state, "
            "bool output_final_state, bool use_qk_l2norm_in_kernel, str function) -> Tensor",
            output_like="value",
            dtype_like="query",
            final_state_argument="output_final_state",
            returns_pair=True,
        ),
        Leaf(
            # hidden_states [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, S], D, dt_bias [H] -> [B, T, H, P]
            "mamba_chunk_scan_combined",
            "(Tensor hidden_states, Tensor dt, Tensor A, Tensor B, Tensor C, int chunk_size, Tensor? D, "
            "Tensor? dt_bias, Tensor? initial_states, bool dt_softplus, float[] dt_limit, "
            "bool return_final_states, str function) -> Tensor",
            output_like="hidden_states",
            dtype_like="hidden_states",
            final_state_argument="return_final_states",
        ),
        Leaf(
            # hidden_states, dt, z [B, C, T], A [C, S], B, C [B, S, T], D, delta_bias [C] -> [B, C, T]
            "selective_scan_fn",
            "(Tensor hidden_states, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
            "Tensor? delta_bias, bool delta_softplus, bool return_last_state, bool use_mambapy, "
            "bool use_associative_scan, str function) -> Tensor",
            output_like="hidden_states",
            dtype_like="hidden_states",
            final_state_argument="return_last_state",
        ),
    )
}
"""Kernel name -> leaf."""


def is_leaf(node: torch.fx.Node, name: str) -> bool:
    """Whether a node calls the leaf of this kernel name: `is_leaf(node, "chunk_kda")`."""
    return node.op == "call_function" and node.target is LEAVES[name].operator


def leaf_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a leaf's node by name, all of them present."""
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


@contextlib.contextmanager
def leaves_in_place(model: nn.Module) -> Iterator[None]:
    """For the time of a trace, let every leaf function that the model's code can see emit its operator."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for namespace in _namespaces(model):
            for name, value in list(namespace.items()):
                leaf = LEAVES.get(kernel_name(value) or "")
                if leaf is not None:
                    replaced.append((namespace, name, value))
                    namespace[name] = _emitter(leaf, value)
        yield
    finally:
        for namespace, name, value in reversed(replaced):
            namespace[name] = value


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Where the model's code looks functions up: globals of its classes' files, attributes of its modules."""
    files = {
        base.__module__
        for module in model.modules()
        for base in type(module).__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
    }
    found = [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules]
    return found + [vars(module) for module in model.modules()]


def kernel_name(value: object) -> str | None:
    """The kernel name that a function was marked with, or None.

    The mark is the `kernel_layer_name` of a function turned into a module (if the `kernels` package is there), or
    else the name in the closure of transformers' decorator.
    """
    if isinstance(value, nn.Module):
        name = getattr(type(value), "kernel_layer_name", None)
        return name if isinstance(name, str) and _closure(type(value).forward).get("func") else None
    if isinstance(value, FunctionType) and value.__code__.co_qualname.startswith(_DECORATOR):
        return _closure(value).get("func_name")
    return None


def _torch_function(value: object) -> FunctionType:
    """The plain torch function under the marks."""
    if isinstance(value, nn.Module):
        value = _closure(type(value).forward)["func"]
    function = inspect.unwrap(value)  # type: ignore[arg-type]
    assert isinstance(function, FunctionType)
    return function


def _closure(function: object) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _emitter(leaf: Leaf, marked: Any) -> Callable[..., Any]:
    """The stand-in for one marked function: same call, but it emits the leaf's operator.

    Callers pass their own keyword arguments on; those that the function takes as `**kwargs` and never looks at are
    dropped, a tensor among them is refused.
    """
    key, function = register_function(marked)
    signature = inspect.signature(function)
    rest_name = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    reads_rest = any(
        i.argval == rest_name and i.opname.startswith("LOAD")
        for i in dis.get_instructions(function)
    )
    wanted = [argument.name for argument in leaf.operator._schema.arguments][:-1]  # type: ignore[attr-defined]

    def emit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        rest = values.pop(rest_name, {}) if rest_name else {}
        unknown = [
            name for name, value in rest.items() if isinstance(value, torch.Tensor) or reads_rest
        ]
        if unknown or values.keys() != set(wanted):
            raise LeafUnsupported(
                f"{key} called with what {leaf.operator_name} lacks: {unknown or values.keys()}"
            )
        if leaf.final_state_argument and values[leaf.final_state_argument]:
            raise LeafUnsupported(
                f"{key} called for its final state, which {leaf.operator_name} does not give"
            )
        output = leaf.operator(*(values[name] for name in wanted), key)
        return (output, None) if leaf.returns_pair else output

    return emit


_FUNCTIONS: dict[str, FunctionType] = {}


def register_function(marked: Any) -> tuple[str, FunctionType]:
    """The torch function under a marked one, and the name by which a leaf's operator runs it."""
    function = _torch_function(marked)
    key = f"{function.__module__}:{function.__qualname__}"
    _FUNCTIONS[key] = function
    return key, function


def _function(key: str) -> FunctionType:
    if key not in _FUNCTIONS:
        module, _, name = key.partition(":")
        found: ModuleType = importlib.import_module(module)
        _FUNCTIONS[key] = _torch_function(getattr(found, name))
    return _FUNCTIONS[key]


def output_dtype(leaf: Leaf, values: dict[str, Any]) -> torch.dtype:
    """SSD returns its float32 sums as they are; a selective scan's skip and gate promote (D comes in float32)."""
    if leaf.name == "mamba_chunk_scan_combined":
        return torch.float32
    dtype: torch.dtype = values[leaf.dtype_like].dtype
    for name in ("D", "z") if leaf.name == "selective_scan_fn" else ():
        if values[name] is not None:
            dtype = torch.promote_types(dtype, values[name].dtype)
    return dtype


def _define(leaf: Leaf) -> None:
    """Register the operator: it runs the torch function and has its gradient; its fake says the output's shape."""
    names = [part.split()[-1] for part in leaf.schema[1 : leaf.schema.index(")")].split(",")]

    def run(*args: Any) -> torch.Tensor:
        values = dict(zip(names, args, strict=True))
        output = _function(values.pop("function"))(**values)
        return output[0] if isinstance(output, tuple) else output

    def empty(*args: Any) -> torch.Tensor:
        values = dict(zip(names, args, strict=True))
        like = values[leaf.output_like]
        dtype = output_dtype(leaf, values)
        return torch.empty(like.shape, dtype=dtype, device=like.device)

    define(f"leaf_{leaf.name}", leaf.schema, run, empty)


for _leaf in LEAVES.values():
    _define(_leaf)
