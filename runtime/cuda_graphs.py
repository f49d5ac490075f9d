"""Steps from CUDA graphs, one per bucket of sizes, recorded when first needed: decode steps, and those with prompts.

A graph is recorded over tensors that stay where they are: a step copies its metadata into them and replays. Nothing of
a step is baked in but its buckets: the numbers of tokens and of sequences, and the width of the page table, by which
kernels decide into how many parts they cut a sequence. Sequences that fill the bucket of a decode step up have one
token each in the scratch page and slot. Of a step with prompts one more sequence takes the tokens that its bucket has
more, in the scratch page and slot, and those that fill it up have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from regraft.kernels.whole import cdiv
from regraft.rewriter.declare import EVERYTHING, Reach, field_of

from .batch import Batch, is_block_table
from .program import Program
from .request import PENDING
from .staging import Arrays, Layout, upload

_LONG = ("state_slots", "extents", "logits_rows")


_PAGES = (128, 512, 2048, 8192)
"""Widths of page tables that graphs are recorded for, beside the widest."""


class CaptureError(RuntimeError):
    """A decode step cannot be recorded as a CUDA graph: which operator stands in the way."""


_FEW_SEQUENCES = 2
"""Of a step with prompts: kernels cut long texts otherwise than a crowd of short ones."""

_PARTS = 16
"""Numbers of tokens of steps with prompts, at equal distances: what is filled up takes less time than launching a
step's kernels one by one would.
"""


Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Records a call without arguments: what repeats it, and where its result is after each repetition."""


class Key(NamedTuple):
    """The sizes of a graph: tokens, sequences, and columns of its page table."""

    tokens: int
    sequences: int
    width: int
    is_decode: bool


@dataclass(frozen=True)
class Recorded:
    """A step of one bucket: what repeats it, where its metadata and page tables are copied to, and where it leaves
    logits.
    """

    replay: Callable[[], None]
    layout: Layout
    buffer: torch.Tensor
    tables: dict[str, torch.Tensor]
    logits: torch.Tensor


class CudaRecorder:
    """Records CUDA graphs, whose memory is shared: no two of them are under way at once."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """A graph of `call`, which is run twice before: what is built at a first call must not be recorded."""
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            call()
            call()
        current.wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Of this thread alone: others make requests meanwhile, and may copy to the device.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode=mode):
                result = call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            self._leave_failed(current)
            raise CaptureError(str(error)) from error
        return graph.replay, result

    def _leave_failed(self, current: torch.cuda.Stream) -> None:
        """What torch leaves behind where a capture fails: its stream as the current one, its memory as in use, and
        generators as in a capture, where no number can be drawn. A capture that does not fail puts them right.
        """
        torch.cuda.set_stream(current)
        self._memory = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=current.device)


def buckets(largest: int) -> list[int]:
    """Batch sizes that graphs are recorded for: closer together where a batch is small, at most an eighth apart."""
    sizes = [2, 4, 8]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(8, (1 << sizes[-1].bit_length()) // 16))
    return [size for size in sizes if size < largest] + [max(2, largest)]


class StepGraphs:
    """Runs decode steps of at most `max_requests` sequences, and steps with prompts of at most `max_tokens` tokens, by
    default none. A sequence has at most `max_pages` pages, None for any number.

    `forward` maps a step's inputs by name to logits, `pools` are its caches by name, and `last_tokens` has by slot what
    a PENDING token stands for. `explain` names the operator that keeps a step with these inputs from being recorded.
    """

    def __init__(
        self,
        forward: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
        pools: Mapping[str, torch.Tensor],
        last_tokens: torch.Tensor,
        max_requests: int,
        max_pages: int | None,
        recorder: Recorder | None = None,
        explain: Callable[[Mapping[str, torch.Tensor]], str] = lambda inputs: "",
        reaches: Sequence[Reach] = (EVERYTHING,),
        max_tokens: int = 0,
    ) -> None:
        device = last_tokens.device
        self._reaches = reaches
        self._record_call = recorder or CudaRecorder()
        self._explain = explain
        self._forward = forward
        self._pools = pools
        self._last_tokens = last_tokens
        self._buckets = buckets(max_requests)
        self._widths = list(_PAGES)
        if max_pages is not None:
            self._widths = [pages for pages in _PAGES if pages < max_pages] + [max(2, max_pages)]
        sizes = {cdiv(max_tokens * part, _PARTS) for part in range(1, _PARTS + 1)}
        self._token_buckets = sorted(sizes - {0, 1})
        self._most_sequences = self._buckets[-1] + 1  # and one that fills a step with prompts up
        self._met: set[tuple[int, int]] = set()
        self._recorded: dict[Key, Recorded] = {}
        self._logits: torch.Tensor | None = None
        # One for each width: a part of a wider one would have other strides, for which layers were not compiled.
        self._tables: dict[tuple[str, int], torch.Tensor] = {}
        self._offsets = torch.arange(self._buckets[-1] + 1, dtype=torch.int32, device=device)

    def takes(self, num_sequences: int, num_tokens: int) -> bool:
        """Whether a step of this size is a decode step that some bucket holds."""
        return num_sequences == num_tokens <= self._buckets[-1]

    def takes_prompts(self, batch: Batch) -> bool:
        """Whether some bucket holds this step with prompts. The first step of a bucket is not taken: it may be the
        only one, which would not be worth recording.
        """
        bucket = self._bucket_with_prompts(batch.arrays)
        is_known = bucket in self._met
        if bucket is not None:
            self._met.add(bucket)
        return is_known

    def leave_prompts(self) -> None:
        """Takes no step with prompts from now on."""
        self._token_buckets.clear()

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [bucket, vocab], overwritten by the next run. The first rows are those of the batch's `logits_rows`.

        Raises CaptureError if the step cannot be recorded.
        """
        arrays = batch.arrays
        count = len(arrays["context_lens"])
        tables = {name: arrays[name] for name in arrays if is_block_table(name)}
        pages = max(table.shape[1] for table in tables.values())
        if batch.is_decode:
            recorded = self.recorded(max(count, len(arrays["logits_rows"])), pages)
        else:
            bucket = self._bucket_with_prompts(arrays)
            assert bucket is not None, "a step that no bucket holds"
            recorded = self._graph(*bucket, pages, is_decode=False)
            arrays = _filled_up(arrays, *bucket)
        recorded.buffer.copy_(recorded.layout.pinned(arrays), non_blocking=True)
        for name, table in upload(tables, recorded.buffer.device).items():
            recorded.tables[name][:count, : table.shape[1]] = table
        recorded.replay()
        return recorded.logits

    def forget(self) -> None:
        """Drops every graph: what they read has moved."""
        self._recorded.clear()

    def recorded(self, count: int, pages: int) -> Recorded:
        """The graph of a decode step of `count` sequences with at most `pages` pages each."""
        bucket = _least(self._buckets, count)
        return self._graph(bucket, bucket, pages, is_decode=True)

    def _bucket_with_prompts(self, arrays: Arrays) -> tuple[int, int] | None:
        """Tokens and sequences of the bucket that holds a step; None if none does."""
        count = arrays["input_ids"].shape[1]
        tokens = next((size for size in self._token_buckets if size >= count), None)
        if tokens is None:
            return None
        wanted = max(len(arrays["context_lens"]) + (tokens > count), len(arrays["logits_rows"]))
        sizes = (_FEW_SEQUENCES, self._most_sequences)
        return None if wanted > sizes[-1] else (tokens, _least(sizes, wanted))

    def _graph(self, tokens: int, sequences: int, pages: int, *, is_decode: bool) -> Recorded:
        width = next((width for width in self._widths if width >= pages), 0)
        key = Key(tokens, sequences, width or 1 << (pages - 1).bit_length(), is_decode)
        if key not in self._recorded:
            self._recorded[key] = self._record(key)
        return self._recorded[key]

    def _record(self, key: Key) -> Recorded:
        layout = Layout.of(_metadata(key, self._reaches))
        tables = {}
        for reach in self._reaches:
            name = field_of("block_table", reach)
            tables[name] = self._table(name, key.width)[: key.sequences]
        device = self._last_tokens.device
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        # A decode step has a token a sequence, always: then the offsets and the tokens' slots are known.
        given = {"cu_seqlens": self._offsets[: key.sequences + 1], **layout.views(buffer)}
        slots = given["state_slots"]
        if not key.is_decode:
            given["cu_seqlens"][1:] = key.tokens  # of the first sequence, until a step says so
            slots = given.pop("token_slots")
        inputs = {**given, **tables, **self._pools}
        try:
            replay, logits = self._record_call(lambda: self._step(inputs, slots, key.is_decode))
        except CaptureError as error:
            operator = self._explain(inputs) or "a step"
            raise CaptureError(f"{operator} cannot be recorded: {error}") from error
        return Recorded(replay, layout, buffer, tables, logits)

    def _table(self, name: str, width: int) -> torch.Tensor:
        """[most sequences, width], one for all graphs of this width."""
        if (name, width) not in self._tables:
            shape, device = (self._most_sequences, width), self._last_tokens.device
            self._tables[name, width] = torch.zeros(shape, dtype=torch.int32, device=device)
        return self._tables[name, width]

    def _step(
        self, inputs: Mapping[str, torch.Tensor], token_slots: torch.Tensor, is_decode: bool
    ) -> torch.Tensor:
        ids = inputs["input_ids"]
        known = torch.where(ids == PENDING, self._last_tokens[token_slots], ids)
        logits = self._forward({**inputs, "input_ids": known})
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if is_decode else self._in_one_place(logits)

    def _in_one_place(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy where all graphs of steps with prompts leave theirs: they are many, and each would keep its own."""
        if self._logits is None:
            shape = (self._most_sequences, logits.shape[-1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits[: len(logits)].copy_(logits)


def _least(sizes: Sequence[int], count: int) -> int:
    return next(size for size in sizes if size >= count)


def _filled_up(arrays: Arrays, tokens: int, sequences: int) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a step with prompts: the sequence behind its last one takes the tokens that are missing."""
    offsets = np.full(sequences + 1, tokens, dtype=np.int32)
    offsets[: len(arrays["cu_seqlens"])] = arrays["cu_seqlens"]
    return {**arrays, "cu_seqlens": offsets, "token_slots": _token_slots(arrays)}


def _token_slots(arrays: Arrays) -> np.ndarray[Any, Any]:
    """[N] the slot of each token's sequence."""
    return np.repeat(arrays["state_slots"], np.diff(arrays["cu_seqlens"]))


def _metadata(key: Key, reaches: Sequence[Reach]) -> dict[str, np.ndarray[Any, Any]]:
    """Shapes and dtypes of what a bucket's step is given, as scratch."""
    tokens, sequences = key.tokens, key.sequences
    mappings = [field_of("slot_mapping", reach) for reach in reaches]
    metadata: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": np.zeros((1, tokens), dtype=np.int64),
        "position_ids": np.zeros((1, tokens), dtype=np.int64),
        **{name: np.zeros(sequences, dtype=np.int64) for name in _LONG},
        **{name: np.zeros(tokens, dtype=np.int64) for name in mappings},
        "context_lens": np.zeros(sequences, dtype=np.int32),
    }
    if not key.is_decode:
        metadata["cu_seqlens"] = np.zeros(sequences + 1, dtype=np.int32)
        metadata["token_slots"] = np.zeros(tokens, dtype=np.int64)
    return metadata


def operator_that_waits(program: Program, inputs: Mapping[str, torch.Tensor]) -> str:
    """The first operator of a step that makes the host wait for the device, with its module path; "" if none does."""
    found: list[str] = []

    def look(at: int, arguments: Sequence[Any]) -> None:
        body = program.steps[at].body
        if found or not isinstance(body, fx.GraphModule):
            return
        watched = _Watched(body)
        torch.cuda.set_sync_debug_mode("error")
        try:
            watched.run(*arguments)
        except RuntimeError:
            path = watched.current.meta.get("path") or program.steps[at].path
            found.append(f"{watched.current.target} in {path}")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    program(inputs, look)
    return found[0] if found else ""


class _Watched(fx.Interpreter):
    """Remembers the node that runs."""

    current: fx.Node

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        return super().run_node(n)
