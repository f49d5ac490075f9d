"""Linear maps with weights of 8 bits, made in the ways in which libraries make them.

    model = quantised(build("llama"), "wrapper")

Each way replaces the linear maps of the decoder's layers. WAYS keep rows apart; MIXING let one row's numbers
depend on the others, as a scale for all activations does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

aten = torch.ops.aten


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] as int8 [N, K] and a scale per row [N, 1]."""
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


def product(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return functional.linear(x, q.to(x.dtype) * scale)


def by_tensor(x: Tensor) -> Tensor:
    """Rounded to 127 steps of the largest number in it: every row depends on all others."""
    step = x.abs().amax() / 127
    return (x / step).round() * step


def by_row(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (x / step).round().to(torch.int8).to(x.dtype) * step


class Wrapper(Tensor):
    """int8 and scale behind the face of a float tensor; torch functions are replaced, as torchao does."""

    activations: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(
            cls, q.shape, strides=q.stride(), dtype=scale.dtype, device=q.device
        )

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Wrapper:
        return cls(parts["q"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and isinstance(args[1], Wrapper):
            return product(cls.activations(args[0]), args[1].q, args[1].scale)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].q, args[0].scale)
        raise NotImplementedError(func)


class Dispatched(Wrapper):
    """As Wrapper, but every operation is replaced below autograd: the trace sees `linear` of a wrapper."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.t.default:
            return cls(args[0].q.t(), args[0].scale.t())
        if func in (aten.mm.default, aten.linear.default):
            x, weight = args
            return func(cls.activations(x), weight.q.to(x.dtype) * weight.scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


class WrapperByRow(Wrapper):
    activations = staticmethod(by_row)


class WrapperByTensor(Wrapper):
    activations = staticmethod(by_tensor)


class DispatchedByTensor(Dispatched):
    activations = staticmethod(by_tensor)


class Carrier(nn.Parameter):
    """int8 numbers with the scale as an attribute, as bitsandbytes does."""

    scale: Tensor


class CarrierLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        q, scale = rounded(linear.weight)
        self.weight = Carrier(q, requires_grad=False)
        self.weight.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.weight.scale)


class BufferLinear(nn.Module):
    """int8 numbers in buffers, put together in its own forward, as HQQ and compressed-tensors do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        q, scale = rounded(linear.weight)
        self.register_buffer("q", q)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.q, self.scale)


class Fetching(MutableMapping[str, Any]):
    """Parameters that are kept elsewhere; what is assigned is copied, as compressed-tensors' caches do."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def __getitem__(self, name: str) -> Any:
        return self.kept[name]

    def __setitem__(self, name: str, value: Any) -> None:
        with torch.no_grad():
            self.kept[name].copy_(value)

    def __delitem__(self, name: str) -> None:
        del self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


def fetching(linear: nn.Linear) -> nn.Module:
    linear._parameters = Fetching(linear._parameters)
    return linear


class OperatorLinear(BufferLinear):
    """A library's own operator does it all."""

    name = "product"

    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch.ops.quantised_test, self.name)(x, self.q, self.scale)


class CompositeLinear(OperatorLinear):
    name = "composite"


class ByTensorLinear(OperatorLinear):
    name = "by_tensor"


class OutliersLinear(OperatorLinear):
    """Of two operators, the first returns which columns it found, as many as there are."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.ops.quantised_test.outliers(x)
        return torch.ops.quantised_test.with_outliers(rows, columns, self.q, self.scale)


class ManyRowsLinear(OperatorLinear):
    """As some products of whole numbers are, on a GPU."""

    name = "many_rows"


class SeveralRowsLinear(OperatorLinear):
    name = "several_rows"


class Float8Linear(OperatorLinear):
    """Rows are rounded before the operator gets them, with a scale each."""

    name = "float8"

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
        rows = (x / scale).to(torch.float8_e4m3fn)
        return torch.ops.quantised_test.float8(rows, self.q, self.scale) * scale


def wrapped_by(kind: type[Wrapper]) -> Callable[[nn.Linear], nn.Module]:
    def replace(linear: nn.Linear) -> nn.Module:
        linear.weight = nn.Parameter(kind(*rounded(linear.weight)), requires_grad=False)
        return linear

    return replace


WAYS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "wrapper": wrapped_by(Wrapper),
    "dispatched": wrapped_by(Dispatched),
    "carrier": CarrierLinear,
    "buffers": BufferLinear,
    "operator": OperatorLinear,
    "composite": CompositeLinear,
}
FEW_ROWS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "17 and more": ManyRowsLinear,
    "2 and more": SeveralRowsLinear,
}
"""Operators that do not take any number of rows."""
MIXING: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "wrapper": wrapped_by(WrapperByTensor),
    "dispatched": wrapped_by(DispatchedByTensor),
    "operator": ByTensorLinear,
    "outliers": OutliersLinear,
}
ROUNDING = {"by row": wrapped_by(WrapperByRow), "float8 rows": Float8Linear}


def quantised(
    model: PreTrainedModel, replace: Callable[[nn.Linear], nn.Module], only: str = ""
) -> PreTrainedModel:
    """`model` with the linear maps of its layers (whose paths end with `only`) replaced."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in path and path.endswith(only):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, replace(module))
    return model.eval()


def _outliers(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), (x.abs() > 6).flatten(0, -2).any(0).nonzero()[:, 0]


def _with_outliers(x: Tensor, columns: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    rows = by_row(x)
    rows[..., columns] = x[..., columns]
    return product(rows, q, scale)


def _define() -> None:
    signature = "(Tensor x, Tensor q, Tensor scale) -> Tensor"
    library = torch.library.Library("quantised_test", "DEF")
    for name, run in {
        "product": product,
        "by_tensor": lambda x, q, scale: product(by_tensor(x), q, scale),
        "many_rows": lambda x, q, scale: product(_at_least(x, 17), q, scale),
        "several_rows": lambda x, q, scale: product(_at_least(x, 2), q, scale),
        "float8": lambda x, q, scale: product(x.float(), q, scale),
    }.items():
        library.define(name + signature)
        library.impl(name, run, "CPU")
        fake = _shape_of_float if name == "float8" else _shape
        torch.library.register_fake(f"quantised_test::{name}", fake, lib=library)
    library.define("composite" + signature)
    library.impl("composite", product, "CompositeImplicitAutograd")
    library.define("outliers(Tensor x) -> (Tensor, Tensor)")
    library.impl("outliers", _outliers, "CPU")
    torch.library.register_fake("quantised_test::outliers", _some_columns, lib=library)
    library.define("with_outliers(Tensor x, Tensor columns, Tensor q, Tensor scale) -> Tensor")
    library.impl("with_outliers", _with_outliers, "CPU")
    fake = lambda x, columns, q, scale: _shape(x, q, scale)  # noqa: E731
    torch.library.register_fake("quantised_test::with_outliers", fake, lib=library)
    globals()["_LIBRARY"] = library  # operators live as long as it does


def _shape(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], q.shape[0])


def _shape_of_float(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], q.shape[0], dtype=torch.float32)


def _at_least(x: Tensor, rows: int) -> Tensor:
    count = x.shape[:-1].numel()
    if count < rows:
        raise RuntimeError(f"self.size(0) needs to be at least {rows}, but got {count}")
    return x


def _some_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return torch.empty_like(x), torch.empty(count, dtype=torch.int64)


_define()
