"""From an exported program to functional operators: traced again only where that is needed, and right either way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export

from regraft.rewriter import capture as capturing
from regraft.rewriter import functional as functional_file
from regraft.rewriter.capture import capture
from regraft.rewriter.functional import functional
from tests.families.models import build
from tests.tolerance import assert_close

Function = Callable[[Tensor, Tensor], Tensor]


def twice_written(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y.add_(w).mul_(w)
    return y + 1


def part_written(x: Tensor, w: Tensor) -> Tensor:
    y = x.new_zeros(x.shape)
    y[..., :3] = x[..., 1:4]
    y[1:, 3:] = w[3:] * x[1:, 3:]
    return y.relu()


def view_that_is_not_read_again(x: Tensor, w: Tensor) -> Tensor:
    rows = (x @ torch.outer(w, w)).unsqueeze(0)
    return rows.sigmoid_() + x


def spellings(x: Tensor, w: Tensor) -> Tensor:
    one, two = x.to(torch.float64).to(torch.float64).chunk(2, dim=-1)
    flat = (one + two).unsqueeze(0).flatten(0, 1).contiguous()
    return flat.to(torch.float32).masked_fill_(flat > 1, 0.5).reshape(-1, 3)


def view_that_is_read_again(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    rows = y.unsqueeze(0)
    y.add_(w)
    return rows + 1


def written_through_a_view(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y.unsqueeze(0).add_(w)
    return y + 1


def part_written_that_is_read(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    part = y[..., :3]
    part.copy_(x[..., 1:4])
    return torch.cat([part, y], -1)


def whole_numbers(x: Tensor, w: Tensor) -> Tensor:
    y = x.long() * 2
    y.mul_(3)
    return y


def other_dtype(x: Tensor, w: Tensor) -> Tensor:
    y = x.to(torch.bfloat16) + 1
    y.mul_(w)
    return y


def part_of_another_dtype(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y[..., :3] = w[:3].to(torch.bfloat16) * 2
    return y


def uneven_pieces(x: Tensor, w: Tensor) -> Tensor:
    return x.chunk(4, dim=-1)[-1] * 2


SPELLED = (twice_written, part_written, view_that_is_not_read_again, spellings)
RETRACED = (
    view_that_is_read_again,
    written_through_a_view,
    part_written_that_is_read,
    whole_numbers,
    other_dtype,
    part_of_another_dtype,
    uneven_pieces,
)


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 2, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def program_of(function: Function) -> ExportedProgram:
    return export(
        Model(function), (torch.randn(5, 6),), dynamic_shapes=({0: Dim.AUTO},), strict=False
    )


@pytest.fixture
def retraced(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    found: list[ExportedProgram] = []
    original = ExportedProgram.run_decompositions

    def noted(self: ExportedProgram, *args: object, **kwargs: object) -> ExportedProgram:
        found.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", noted)
    return found


def check(function: Function) -> None:
    program, model = functional(program_of(function), {}), Model(function)
    assert not any(writes(node) for node in program.graph.nodes)
    for rows in (5, 2, 9):
        x = torch.randn(rows, 6)
        (found,) = torch.fx.Interpreter(program.graph_module).run(model.weight, x)
        assert_close(found, model(x.clone()))


def writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


@pytest.mark.parametrize("function", SPELLED, ids=lambda f: f.__name__)
def test_spelled_anew(function: Function, retraced: list[ExportedProgram]) -> None:
    check(function)
    assert retraced == []


@pytest.mark.parametrize("function", RETRACED, ids=lambda f: f.__name__)
def test_traced_again(function: Function, retraced: list[ExportedProgram]) -> None:
    check(function)
    assert len(retraced) == 1


@pytest.mark.parametrize("function", [view_that_is_read_again, written_through_a_view])
def test_mutant_other_readers_are_not_looked_for(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional_file, "_is_alone", lambda write, base, memory: True)
    with pytest.raises(AssertionError, match="max abs error"):
        check(function)


def test_what_is_to_be_taken_apart_is(retraced: list[ExportedProgram]) -> None:
    softmax = torch.ops.aten.softmax.int
    table = {softmax: lambda x, dim, dtype=None: x.exp() / x.exp().sum(dim, keepdim=True)}
    program = functional(program_of(lambda x, w: (x * w).softmax(-1)), table)
    assert len(retraced) == 1
    assert softmax not in [node.target for node in program.graph.nodes]


@pytest.mark.parametrize("name", ["bloom", "mixtral", "qwen3_next"])
def test_a_second_trace_gives_the_same_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = capture(build(name))
    monkeypatch.setattr(
        capturing, "functional", lambda program, table: program.run_decompositions(dict(table))
    )
    traced = capture(build(name))
    assert shape_of_graph(spelled.graph) == shape_of_graph(traced.graph)
    assert spelled.weight_names == traced.weight_names
    assert (spelled.min_tokens, spelled.max_tokens) == (traced.min_tokens, traced.max_tokens)


def shape_of_graph(graph: fx.Graph) -> list[str]:
    """Every node with what it is computed from, whatever the order of the nodes."""
    told: dict[fx.Node, str] = {}
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"#{hash(told[n])}")
        facts = [node.meta.get(fact) for fact in ("shape", "dtype", "size", "path")]
        told[node] = f"{node.op} {node.target} {arguments} {facts}"
    return sorted(told.values())
