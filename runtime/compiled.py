"""Compiled execution: each distinct layer goes through Inductor once, whatever the number of tokens.

Sizes that change from step to step are found by running the program twice, at different sizes throughout, and are
told to the compiler; a third and a fourth run then show that nothing is compiled twice. A body that fixes a size all
the same runs operator by operator, and a note says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx, nn

from regraft.rewriter.declare import RowSpec, StateSpec

from .dependent_launch import compile_graph
from .program import Body, Program
from .scratch import scratch_step

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

SMALLEST = 2
"""Compiled code may take a size of 1 for a constant: no varying size is ever less than this."""

_SIZES = ((120, 6, 4, 2), (208, 9, 5, 11))
"""Tokens, sequences, rows of logits and spare pages of the runs that find varying sizes: all different."""


class GraphModel(Protocol):
    """What compiled execution needs of a rewritten model beyond the runtime's own protocol."""

    rows: tuple[RowSpec, ...]
    states: tuple[StateSpec, ...]
    vocab_size: int
    device: torch.device
    min_tokens: int
    module: fx.GraphModule
    input_names: tuple[str, ...]


class CompiledProgram:
    """The rewritten graph of `model` under a compiler, by default Inductor.

    `pools` are the tensors that steps will be given, by name. `notes` gets a line on what is not compiled.
    `num_compiled` counts compilations: one per distinct body, and never more for whatever sizes follow. With `steady` a
    body that would run in another way from some step on is a RuntimeError: its results would be other bits.
    """

    def __init__(
        self,
        model: GraphModel,
        pools: Mapping[str, torch.Tensor],
        notes: list[str],
        compiler: Compiler | None = None,
        steady: bool = False,
    ) -> None:
        self.num_compiled = 0
        self._is_final = False
        self._compiler = compiler or partial(compile_graph, device=model.device, notes=notes)
        self._is_warm = False
        self._eager: set[nn.Module] = set()
        self.program = Program(model.module, model.input_names, self._prepare)
        self._notes = notes
        self._warm_up(model, pools)
        self._is_final = steady

    @property
    def is_recordable(self) -> bool:
        """Whether no step runs code of the host, so that a CUDA graph can stand for a whole step."""
        return not self.program.host_paths

    def refresh(self) -> bool:
        """See Program.refresh."""
        return self.program.refresh()

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [1, S, vocab] or [S, vocab], as the graph has them."""
        return self.program(inputs)

    def _prepare(self, body: nn.Module) -> Body:
        def backend(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
            if self._is_warm:
                self._leave_out(body)
                return graph.forward
            self.num_compiled += 1
            return self._compiler(graph, examples)

        compiled = torch.compile(body, backend=backend, fullgraph=True, dynamic=False)

        def run(*arguments: torch.Tensor) -> Any:
            return body(*arguments) if body in self._eager else compiled(*arguments)

        return run

    @torch.no_grad()
    def _warm_up(self, model: GraphModel, pools: Mapping[str, torch.Tensor]) -> None:
        page_size = max((pools[row.name].shape[1] for row in model.rows), default=1)
        taken = {size for pool in pools.values() for size in pool.shape[:1]}
        batches = [{**scratch_step(sizes, page_size, model, taken), **pools} for sizes in _SIZES]
        varying = self._varying(batches)
        self._add_pools(varying, pools)
        self._mark(batches[0], varying)
        self._is_warm = True
        self.program(batches[1])
        if self.program.host_paths:
            paths = ", ".join(self.program.host_paths)
            self._notes.append(f"replayed regions run on the host, outside CUDA graphs: {paths}")

    def _leave_out(self, body: nn.Module) -> None:
        """Another size would have to be compiled for: from now on the body runs operator by operator."""
        paths = [
            step.path or "outside the layers" for step in self.program.steps if step.body is body
        ]
        if self._is_final:
            raise RuntimeError(
                f"batch_invariant=True: {', '.join(paths)} was not compiled for the sizes of this step, and would have "
                "other bits from now on: compile=False runs every step operator by operator"
            )
        self._eager.add(body)
        self._notes.append(f"not compiled, since the code fixes a size: {', '.join(paths)}")

    def _varying(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> list[list[set[int]]]:
        """Per step and input, the dimensions whose sizes differ between the batches."""
        shapes: list[list[list[torch.Size]]] = []
        with self._everything_eager():
            for batch in batches:
                shapes.append([[] for _ in self.program.calls])

                def note(at: int, arguments: Sequence[torch.Tensor]) -> None:
                    shapes[-1][at] = [argument.shape for argument in arguments]

                self.program(batch, note)
        return [
            [
                {d for d, pair in enumerate(zip(one, two)) if pair[0] != pair[1]}
                for one, two in zip(*steps)
            ]
            for steps in zip(*shapes)
        ]

    def _add_pools(self, varying: list[list[set[int]]], pools: Mapping[str, torch.Tensor]) -> None:
        """The number of pages or slots depends on free memory: code that is kept on disk must not depend on it."""
        names = {place: name for place, name in self.program._inputs if name in pools}
        for call, dims in zip(self.program.calls, varying):
            for place, found in zip(call.inputs, dims):
                if place in names:
                    found.add(0)

    def _mark(
        self, batch: Mapping[str, torch.Tensor], varying: Sequence[Sequence[set[int]]]
    ) -> None:
        """Compiles everything: a run in which the varying sizes are marked as such."""

        def mark(at: int, arguments: Sequence[torch.Tensor]) -> None:
            for argument, dims in zip(arguments, varying[at]):
                for dim in dims:
                    torch._dynamo.maybe_mark_dynamic(argument, dim)

        self.program(batch, mark)

    @contextlib.contextmanager
    def _everything_eager(self) -> Iterator[None]:
        self._eager = {step.body for step in self.program.steps}
        yield
        self._eager = set()
