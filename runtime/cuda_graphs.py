"""Steps from CUDA graphs, one per bucket of sizes, recorded when first needed: decode steps, and steps that are full.

A graph is recorded over tensors that stay where they are: a step copies its metadata into them and replays. Nothing of
a step is baked in but its buckets: the number of sequences, and the width of the page table, by which kernels decide
into how many parts they cut a sequence. Sequences that fill the bucket of a decode step up have one token each in the
scratch page and slot; those of a full step, which has as many tokens as a step may have, have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

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
"""Of a full step: kernels cut long texts otherwise than a crowd of short ones."""


Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Records a call without arguments: what repeats it, and where its result is after each repetition."""


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
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Of this thread alone: others make requests meanwhile, and may copy to the device.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode=mode):
                result = call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            raise CaptureError(str(error)) from error
        return graph.replay, result


def buckets(largest: int) -> list[int]:
    """Batch sizes that graphs are recorded for: closer together where a batch is small, at most an eighth apart."""
    sizes = [2, 4, 8]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(8, (1 << sizes[-1].bit_length()) // 16))
    return [size for size in sizes if size < largest] + [max(2, largest)]


class StepGraphs:
    """Runs decode steps, and steps of just `full_tokens` tokens where that is given, of at most `max_requests`
    sequences of at most `max_pages` pages each, None for any number.

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
        full_tokens: int | None = None,
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
        is_more = full_tokens is not None and full_tokens > self._buckets[-1]
        self._full_tokens = full_tokens if is_more else None
        self._recorded: dict[tuple[int, int, int], Recorded] = {}
        # One for each width: a part of a wider one would have other strides, for which layers were not compiled.
        self._tables: dict[tuple[str, int], torch.Tensor] = {}
        self._offsets = torch.arange(self._buckets[-1] + 1, dtype=torch.int32, device=device)

    def takes(self, num_sequences: int, num_tokens: int) -> bool:
        """Whether a step of this size is a decode step that some bucket holds."""
        return num_sequences == num_tokens <= self._buckets[-1]

    def takes_full(self, batch: Batch) -> bool:
        """Whether this is a full step that some bucket holds."""
        arrays = batch.arrays
        wanted = max(len(arrays["context_lens"]), len(arrays["logits_rows"]))
        return arrays["input_ids"].shape[1] == self._full_tokens and wanted <= self._buckets[-1]

    def leave_full(self) -> None:
        """Takes no full step from now on."""
        self._full_tokens = None

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [bucket, vocab], overwritten by the next run. The first rows are those of the batch's `logits_rows`.

        Raises CaptureError if the step cannot be recorded.
        """
        arrays = batch.arrays
        count = len(arrays["context_lens"])
        tables = {name: arrays[name] for name in arrays if is_block_table(name)}
        pages = max(table.shape[1] for table in tables.values())
        tokens = None if batch.is_decode else self._full_tokens
        recorded = self.recorded(max(count, len(arrays["logits_rows"])), pages, tokens)
        if tokens is not None:
            missing = recorded.layout.sections["context_lens"].shape[0] - count
            offsets = np.pad(arrays["cu_seqlens"], (0, missing), mode="edge")
            arrays = {**arrays, "cu_seqlens": offsets, "token_slots": _token_slots(arrays)}
        recorded.buffer.copy_(recorded.layout.pinned(arrays), non_blocking=True)
        for name, table in upload(tables, recorded.buffer.device).items():
            recorded.tables[name][:count, : table.shape[1]] = table
        recorded.replay()
        return recorded.logits

    def forget(self) -> None:
        """Drops every graph: what they read has moved."""
        self._recorded.clear()

    def recorded(self, count: int, pages: int, tokens: int | None = None) -> Recorded:
        """The graph of a step of `count` sequences with at most `pages` pages each: a decode step, or a full one of
        `tokens`.
        """
        sizes = self._buckets if tokens is None else (_FEW_SEQUENCES, self._buckets[-1])
        bucket = next(size for size in sizes if size >= count)
        width = next((width for width in self._widths if width >= pages), 0)
        width = width or 1 << (pages - 1).bit_length()
        key = (tokens or bucket, bucket, width)
        if key not in self._recorded:
            self._recorded[key] = self._record(*key)
        return self._recorded[key]

    def _record(self, num_tokens: int, bucket: int, width: int) -> Recorded:
        layout = Layout.of(_metadata(num_tokens, bucket, self._reaches))
        tables = {}
        for reach in self._reaches:
            name = field_of("block_table", reach)
            tables[name] = self._table(name, width)[:bucket]
        device = self._last_tokens.device
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        # A decode step has a token a sequence, always: then the offsets and the tokens' slots are known.
        given = {"cu_seqlens": self._offsets[: bucket + 1], **layout.views(buffer)}
        slots = given["state_slots"]
        if num_tokens > bucket:
            given["cu_seqlens"][1:] = num_tokens  # of the first sequence, until a step says so
            slots = given.pop("token_slots")
        inputs = {**given, **tables, **self._pools}
        try:
            replay, logits = self._record_call(lambda: self._step(inputs, slots))
        except CaptureError as error:
            operator = self._explain(inputs) or "a step"
            raise CaptureError(f"{operator} cannot be recorded: {error}") from error
        return Recorded(replay, layout, buffer, tables, logits)

    def _table(self, name: str, width: int) -> torch.Tensor:
        """[largest bucket, width], one for all graphs of this width."""
        if (name, width) not in self._tables:
            shape, device = (self._buckets[-1], width), self._last_tokens.device
            self._tables[name, width] = torch.zeros(shape, dtype=torch.int32, device=device)
        return self._tables[name, width]

    def _step(self, inputs: Mapping[str, torch.Tensor], token_slots: torch.Tensor) -> torch.Tensor:
        ids = inputs["input_ids"]
        known = torch.where(ids == PENDING, self._last_tokens[token_slots], ids)
        logits = self._forward({**inputs, "input_ids": known})
        return logits.reshape(-1, logits.shape[-1])


def _token_slots(arrays: Arrays) -> np.ndarray[Any, Any]:
    """[N] the slot of each token's sequence."""
    return np.repeat(arrays["state_slots"], np.diff(arrays["cu_seqlens"]))


def _metadata(
    num_tokens: int, bucket: int, reaches: Sequence[Reach]
) -> dict[str, np.ndarray[Any, Any]]:
    """Shapes and dtypes of what a bucket's step is given, as scratch."""
    mappings = [field_of("slot_mapping", reach) for reach in reaches]
    metadata: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": np.zeros((1, num_tokens), dtype=np.int64),
        "position_ids": np.zeros((1, num_tokens), dtype=np.int64),
        **{name: np.zeros(bucket, dtype=np.int64) for name in _LONG},
        **{name: np.zeros(num_tokens, dtype=np.int64) for name in mappings},
        "context_lens": np.zeros(bucket, dtype=np.int32),
    }
    if num_tokens > bucket:
        metadata["cu_seqlens"] = np.zeros(bucket + 1, dtype=np.int32)
        metadata["token_slots"] = np.zeros(num_tokens, dtype=np.int64)
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
