"""A rewritten graph as a list of calls: what runs it step by step, with each distinct body prepared once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .outline import Step, attribute_of, cut

Body = Callable[..., Any]
Observer = Callable[[int, Sequence[torch.Tensor]], None]


@dataclass
class Call:
    """One step on places of a list of values. `dead` are the places that nobody reads afterwards."""

    body: Body
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]
    on_host: bool


class Program:
    """The steps of a rewritten graph, ready to be called.

    `module` has tensors as placeholders, named by `input_names`, and returns a tuple of one tensor. `prepare` turns a
    body into what is called for it; it is asked once for each distinct one. Weights are read when the program is made
    and by `refresh`.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        input_names: Sequence[str],
        prepare: Callable[[nn.Module], Body] = lambda body: body,
    ) -> None:
        self._module = module
        self.steps = cut(module)
        self._places: dict[fx.Node, int] = {}
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._inputs = [(self._place(n), name) for n, name in zip(placeholders, input_names)]
        bodies: dict[nn.Module, Body] = {}
        for step in self.steps:
            if step.body not in bodies:
                bodies[step.body] = step.body if step.on_host else prepare(step.body)
        last_use = {node: at for at, step in enumerate(self.steps) for node in step.inputs}
        (self._result,) = module.graph.output_node().args[0]
        self.calls = [self._call(at, step, bodies, last_use) for at, step in enumerate(self.steps)]
        self._weights = [
            (place, str(node.target))
            for node, place in self._places.items()
            if node.op == "get_attr"
        ]
        self._template: list[Any] = []
        self._addresses: list[int] = []
        self.refresh()

    @property
    def num_bodies(self) -> int:
        """Distinct bodies that are prepared."""
        return len({step.body for step in self.steps if not step.on_host})

    @property
    def host_paths(self) -> list[str]:
        """Module paths of the steps that run Python code."""
        return [step.path for step in self.steps if step.on_host]

    def refresh(self) -> bool:
        """Reads the weights anew; whether any of them is another tensor, or lies elsewhere, than before."""
        template: list[Any] = [None] * len(self._places)
        for place, target in self._weights:
            template[place] = attribute_of(self._module, target)
        addresses = [template[place].data_ptr() for place, _ in self._weights]
        changed = bool(self._template) and addresses != self._addresses
        self._template, self._addresses = template, addresses
        return changed

    def __call__(
        self, inputs: Mapping[str, torch.Tensor], observe: Observer | None = None
    ) -> torch.Tensor:
        """The graph's result. `observe` sees the number of each step and its inputs, before it runs."""
        values = self._template.copy()
        for place, name in self._inputs:
            values[place] = inputs[name]
        for at, call in enumerate(self.calls):
            arguments = [values[place] for place in call.inputs]
            if observe is not None:
                observe(at, arguments)
            results = call.body(*arguments)
            if call.on_host:
                results = (results,)
            for place, result in zip(call.results, results):
                values[place] = result
            del arguments, results
            for place in call.dead:
                values[place] = None
        return values[self._places[self._result]]

    def _place(self, node: fx.Node) -> int:
        return self._places.setdefault(node, len(self._places))

    def _call(
        self, at: int, step: Step, bodies: Mapping[nn.Module, Body], last_use: Mapping[fx.Node, int]
    ) -> Call:
        inputs = tuple(self._place(node) for node in step.inputs)
        results = tuple(self._place(node) for node in step.results)
        dead = tuple(
            self._places[node]
            for node in (*step.inputs, *step.results)
            if last_use.get(node, at) == at and node.op != "get_attr" and node is not self._result
        )
        return Call(bodies[step.body], inputs, results, dead, step.on_host)
