"""The driver: offers every region to every pass in order, replays what is left, and demands a proof.

It owns the chores (dead code, timing, counts, cache declarations), so that a pass contains only its idea.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from .declare import RowSpec, StateSpec
from .errors import RewriteError
from .graph import CapturedGraph, describe
from .module_leaf import is_module_leaf
from .pattern import Declined, Grafting, Pass, Region
from .replay import Replay, graft_replay
from .token_axis import Analysis, analyse, find_regions
from .token_axis.analysis import ROW_WISE
from .token_axis.regions import Verdict, verdict
from .token_axis.value import has_tokens, tokens_multiple

NOT_SEEN = 0.1
"""How far a pass gets with a module that it cannot look into: what it says then is not why the module is replayed."""

ROWS_APART = (
    "only what gives a row the same result, whatever rows are beside it, can be served in a packed row: "
    "if it is known to keep rows apart, name it in row_wise; if not, and it belongs to quantised weights, load them in "
    "another way"
)


@dataclass(frozen=True)
class GraphPass:
    """A pass over the whole graph that grafts no region. `run` returns how many places it changed."""

    name: str
    run: Callable[[CapturedGraph], int]


@dataclass
class Served:
    """How one mixing place is served."""

    region: Region
    kind: str
    served: str
    operator: str
    rows: list[RowSpec] = field(default_factory=list)
    states: list[StateSpec] = field(default_factory=list)
    mask: str = ""
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    replay: Replay | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass
class PassRun:
    """What one pass did."""

    name: str
    matches: int
    declined: list[tuple[Region, Declined]]
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass
class Rewriting:
    """A graph on its way through the passes."""

    captured: CapturedGraph
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    runs: list[PassRun] = field(default_factory=list)
    found: list[Region] = field(default_factory=list)
    proof: Verdict | None = None
    switch_lengths: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    """What else the report is to say."""
    _open: list[Region] | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.captured.graph

    def new_input(self, name: str) -> fx.Node:
        """A placeholder behind the existing ones."""
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(re.sub(r"\W", "_", name))
        node.meta.update(shape=None, dtype=None, path="", source="")
        return node

    @property
    def shortest_row(self) -> int:
        """The shortest packed row that the rewritten graph runs on.

        The trace may have taken a way that only rows of some length take. Of a proven graph without replayed regions
        and with no size in T but multiples of it nothing is left of that: what it says of a row it says of any number
        of them, but for a single one, of which broadcasting may make more.
        """
        multiples = all(
            not has_tokens(size) or tokens_multiple(size) is not None
            for node in self.graph.nodes
            for size in (*(node.meta.get("shape") or ()), *filter(None, [node.meta.get("size")]))
        )
        replayed = any(served.replay is not None for served in self.served)
        least = self.captured.min_tokens
        return min(least, 2) if multiples and not replayed else least

    def open_regions(self) -> list[Region]:
        """Regions not grafted yet; found anew only after the graph has changed."""
        if self._open is None:
            self._open = find_regions(analyse(self.graph))
        return self._open

    def forget_regions(self) -> None:
        self._open = None

    def grafting(self, region: Region) -> Grafting:
        return Grafting(region, self.graph, self.inputs, self.new_input, self.captured)


def rewrite(
    captured: CapturedGraph, passes: Sequence[Pass | GraphPass], *, fallback: str = "replay"
) -> Rewriting:
    """Graft all of `captured` in place. Raises RewriteError if the result is not proven, or on a region that no pass
    takes with `fallback="refuse"`.
    """
    state = Rewriting(captured, _inputs(captured))
    state.found = list(state.open_regions())
    for step in passes:
        before, start = len(captured.graph.nodes), time.perf_counter()
        matches, declined = _run(step, state)
        _tidy(captured)
        seconds = time.perf_counter() - start
        state.runs.append(
            PassRun(step.name, matches, declined, seconds, before, len(captured.graph.nodes))
        )
    _replay_rest(state, fallback)
    _tidy(captured)
    state.proof = verdict(analyse(captured.graph))
    if not state.proof.proven:
        node = state.proof.node
        meta = node.meta if node is not None else {}
        raise RewriteError(
            f"the rewritten graph is {state.proof}",
            operation=str(node.target) if node is not None else "",
            path=meta.get("path", ""),
            source=meta.get("source", ""),
            fix="tokens of different requests would mix: this model cannot be served in a packed row",
        )
    return state


def _inputs(captured: CapturedGraph) -> dict[str, fx.Node]:
    return {str(node.target): node for node in captured.graph.nodes if node.op == "placeholder"}


def _run(step: Pass | GraphPass, state: Rewriting) -> tuple[int, list[tuple[Region, Declined]]]:
    if isinstance(step, GraphPass):
        changed = step.run(state.captured)
        if changed:
            state.forget_regions()
        return changed, []
    matches, declined = 0, []
    moved: dict[fx.Node, fx.Node] = {}
    for region in state.open_regions():
        outcome = _offer(step, _follow(region, moved), state, moved)
        if isinstance(outcome, Declined):
            declined.append((region, outcome))
        else:
            state.served.append(outcome)
            matches += 1
    if matches:
        state.forget_regions()
    return matches, declined


def _offer(
    step: Pass, region: Region, state: Rewriting, moved: dict[fx.Node, fx.Node]
) -> Served | Declined:
    captures = step.pattern(region)
    if isinstance(captures, Declined):
        return captures
    plan = step.check(captures)
    if isinstance(plan, Declined):
        return plan
    grafting = state.grafting(region)
    before = listing(region.nodes)
    step.rewrite(plan, grafting)
    assert not region.closer.users, f"pass {step.name} left {region.closer} in use"
    moved.update(grafting.replaced)
    state.switch_lengths.update(grafting.switch_lengths)
    return Served(
        region, step.kind, "grafted", step.operator, grafting.row_specs, grafting.state_specs, grafting.mask,
        notes=grafting.notes, before=before, after=listing(grafting.made),
    )  # fmt: skip


def listing(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """Nodes as lines of text, for the report. Weights and sizes are left out: they say little and are many."""
    lines = []
    for node in nodes:
        if node.op in ("get_attr", "placeholder") or "size" in node.meta:
            continue
        operands = ", ".join(operand.name for operand in node.all_input_nodes)
        name = getattr(node.target, "_opname", None) or str(node.target)
        lines.append(f"{node.name} = {name}({operands})  {_shown(node.meta.get('shape'))}".rstrip())
    return tuple(lines)


def _shown(shape: object) -> str:
    return f"[{', '.join(map(str, shape))}]" if isinstance(shape, (tuple, list)) else ""


def _follow(region: Region, moved: dict[fx.Node, fx.Node]) -> Region:
    """The region after earlier regions of the same round were replaced."""
    return replace(region, inputs=tuple(moved.get(node, node) for node in region.inputs))


def _replay_rest(state: Rewriting, fallback: str) -> None:
    """Replay what no pass took. Regions that share a closer's node are found anew after each replacement."""
    again = True
    while again:
        again = False
        analysis = analyse(state.graph)
        regions = find_regions(analysis)
        moved: dict[fx.Node, fx.Node] = {}
        for i, region in enumerate(regions):
            served = _replay(_follow(region, moved), analysis, state, fallback, moved)
            state.served.append(served)
            if any(region.closer in other.nodes for other in regions[i + 1 :]):
                again = True
                break


def _replay(
    region: Region,
    analysis: Analysis,
    state: Rewriting,
    fallback: str,
    moved: dict[fx.Node, fx.Node],
) -> Served:
    declined = [
        (run.name, no) for run in state.runs for r, no in run.declined if r.closer is region.closer
    ]
    nearest = max(declined, key=lambda pair: pair[1].progress, default=None)
    known = nearest is not None and nearest[1].progress > 0
    reason = f"{nearest[0]}: {nearest[1]}" if nearest and known else "no pass knows this mixing"
    whole = next((node.meta["leaf"].why for node in region.nodes if is_module_leaf(node)), "")
    if whole and (nearest is None or nearest[1].progress <= NOT_SEEN):
        reason = f"no pass knows this module, which is kept whole: {whole}"
    if fallback == "refuse":
        raise RewriteError(
            f"no pass takes this {region.kind} ({reason})", operation=str(region.closer.target), path=region.path,
            source=region.closer.meta.get("source", ""), fix='allow fallback="replay" (exact, slow)',
        )  # fmt: skip
    _refuse_unservable(region, analysis)
    grafting = state.grafting(region)
    module = graft_replay(region, analysis, grafting, state.captured.min_tokens)
    moved.update(grafting.replaced)
    for old, new in grafting.replaced.items():
        analysis.values[new] = analysis.values[old]
    return Served(
        region, region.kind, "replayed", "replay", grafting.row_specs, reason=reason, replay=module,
        before=listing(region.nodes),
    )  # fmt: skip


def _refuse_unservable(region: Region, analysis: Analysis) -> None:
    """A region may read rows only; anything wide at its edge means that the rows never came back in order."""
    unruled = next((node for node in analysis.unruled if node in region.nodes), None)
    for node in region.inputs:
        if not analysis.value(node).is_row_local and unruled is not None:
            measured = unruled.meta.get(ROW_WISE)
            raise RewriteError(
                f"no rule says what {unruled.target} does to rows"
                + (f", and {measured}" if isinstance(measured, str) else ""),
                operation=str(unruled.target), path=unruled.meta.get("path", ""),
                source=unruled.meta.get("source", ""), fix=ROWS_APART,
            )  # fmt: skip
        if not analysis.value(node).is_row_local:
            raise RewriteError(
                f"tokens are mixed in a way that cannot be undone: {describe(node)}",
                path=region.path, source=region.closer.meta.get("source", ""),
            )  # fmt: skip


def _tidy(captured: CapturedGraph) -> None:
    """Drop what nobody reads any more; keep placeholders."""
    captured.graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output")
    )
    captured.graph.lint()
    captured.module.recompile()
