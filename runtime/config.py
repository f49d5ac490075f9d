"""How large an engine is and which of its features are on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

_CHOICES = {"fallback": ("replay", "refuse"), "validate": ("quick", "full", "off")}

_CHUNK_SIZE = 64


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine, checked when made: a wrong one is a ValueError with value and fix."""

    max_batch_tokens: int = 2048
    """Most tokens of one packed row, that is of one step (tokens; default 2048). It bounds the
    memory of activations."""

    max_requests: int = 128
    """Most requests running at once (requests; default 128). Any number more may wait."""

    page_size: int = 16
    """Tokens whose rows share one page (tokens; default 16). A request wastes half a page on
    average."""

    cache_tokens: int | None = None
    """Rows the cache holds, over all requests (tokens, rounded up to pages; default None: sized by
    `memory_fraction`)."""

    memory_fraction: float | None = None
    """Share of the device's free memory, when the engine starts, that rows and states may take
    together (above 0, at most 1; default None: 0.9 on an accelerator, 0.25 on the CPU). On a GPU that is
    of what the largest step leaves, whose needs are measured first. They never take more than
    `max_requests` requests of full length can use."""

    chunk_size: int = None  # type: ignore[assignment]  # a number once the others are known
    """A prompt that does not fit into one step is cut at multiples of this, counted from its own
    start (tokens; default 64, or `max_batch_tokens` where that is less)."""

    prefix_cache: bool = False
    """Reuse what was computed of a text's beginning: its full pages of rows and, of a recurrent
    model, a copy of its states at a multiple of both `page_size` and `chunk_size` tokens (default
    False). Only requests with the same `cache_salt` share, and only what the present weights
    computed. Rows stay in the cache until room is needed."""

    prefix_checkpoints: int | None = None
    """Most copies of recurrent states kept for the prefix cache, each of the size of a request's
    states (copies; default None: as many as `max_requests`). With `memory_fraction`, no more than fit;
    where there is no room for one, it is left out."""

    compile: bool | None = None
    """Compile the rewritten graph, each distinct layer once (default None: for a model on CUDA)."""

    cuda_graphs: bool | None = None
    """Run decode steps from CUDA graphs (default None: for a compiled model on CUDA, and where a
    step cannot be recorded a line in the report says why; with True that is an error)."""

    batch_invariant: bool = False
    """A request's logits are the same bits whatever else is in the batch and however its text was
    cut: prefill, chunks and decode steps agree, and `score` gives what generation saw (default
    False). Slower; on the CPU and on CUDA. An operation that is not known to be invariant is a
    RewriteError. Holds within one process, for one number of threads."""

    allow_variant: tuple[str, ...] = ()
    """With `batch_invariant`, what may stay though it is not known to be invariant: operations
    ("aten.pow.Tensor_Scalar"), "replay" for replayed regions, or paths of modules ("model.layers.3").
    Nothing is promised of a model that has one (default none)."""

    row_wise: tuple[str, ...] = ()
    """Operators of libraries, as products of quantised weights ("bitsandbytes.gemv_4bit.default"), of
    which you know that row i of what they return depends on row i of what they are given alone.
    Regraft has no rule for them; it takes your word if they do not fail a measurement (default none)."""

    fallback: str = "replay"
    """What becomes of a token-mixing region that no pass knows: "replay" (exact, slow) or "refuse"
    (default "replay")."""

    validate: str = "quick"
    """How much is compared with the original model before serving: "quick", "full" or "off"
    (default "quick")."""

    seed: int = 0
    """Start of the random numbers of requests that bring no seed (default 0)."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_requests", "page_size"):
            _check_count(name, getattr(self, name))
        if vars(self)["chunk_size"] is None:
            object.__setattr__(self, "chunk_size", min(_CHUNK_SIZE, self.max_batch_tokens))
        _check_count("chunk_size", self.chunk_size)
        if self.max_batch_tokens < self.chunk_size:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} is less than "
                f"chunk_size={self.chunk_size}, so a long prompt could never start: raise the "
                "first or lower the second"
            )
        self._check_memory()
        for name in ("prefix_cache", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is neither True nor False")
        self._check_invariance()
        most = self.prefix_checkpoints
        if most is not None and (not _is_int(most) or most < 0):
            raise ValueError(f"prefix_checkpoints={most!r} is not a whole number of 0 or more")
        for name in ("compile", "cuda_graphs"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, bool)):
                raise ValueError(f"{name}={value!r} is none of True, False, None")
        if self.cuda_graphs and self.compile is False:
            raise ValueError("cuda_graphs=True needs a compiled graph: leave compile=False out")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(choices)}")
        if not _is_int(self.seed) or self.seed < 0:
            raise ValueError(f"seed={self.seed!r} is not a whole number of 0 or more")

    def compiles_on(self, device: torch.device) -> bool:
        """Whether the graph of a model on `device` is compiled; ValueError if it must not be."""
        if self.batch_invariant and device.type == "cpu" and (self.compile or self.cuda_graphs):
            raise ValueError(
                "batch_invariant=True with a compiled graph on the CPU: compilers fuse operations, which changes how "
                "they round by where in a row they are; leave compile and cuda_graphs out"
            )
        return bool(self.cuda_graphs) or (
            device.type == "cuda" if self.compile is None else self.compile
        )

    def records_on(self, device: torch.device) -> bool:
        """Whether decode steps of a model on `device` run from CUDA graphs; ValueError if they cannot."""
        if self.cuda_graphs and device.type != "cuda":
            raise ValueError(f"cuda_graphs=True, but the model is on {device}: move it to a GPU")
        return device.type == "cuda" and self.cuda_graphs is not False

    def _check_invariance(self) -> None:
        for field in ("allow_variant", "row_wise"):
            names = getattr(self, field)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{field}={names!r} is no tuple of names")
        names = self.allow_variant
        if names and not self.batch_invariant:
            raise ValueError(f"allow_variant={names!r} says nothing without batch_invariant=True")

    def _check_memory(self) -> None:
        tokens, fraction = self.cache_tokens, self.memory_fraction
        if tokens is not None:
            _check_count("cache_tokens", tokens)
        if fraction is None:
            return
        if tokens is not None:
            raise ValueError(
                f"cache_tokens={tokens} and memory_fraction={fraction} both size the cache: give "
                "one of them"
            )
        if not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ValueError(f"memory_fraction={fraction!r} is not above 0 and at most 1")

    @classmethod
    def from_fields(cls, **fields: Any) -> EngineConfig:
        """A config from keywords; an unknown name is a ValueError that lists the known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ValueError(f"{name!r} is no field of EngineConfig: it has {', '.join(known)}")
        return cls(**fields)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(name: str, value: object) -> None:
    if not _is_int(value) or value < 1:  # type: ignore[operator]  # an int, as just checked
        raise ValueError(f"{name}={value!r} is not a whole number of 1 or more")
