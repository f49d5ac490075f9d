"""Transformers' ContinuousBatchingConfig, read for this engine: no field of it is dropped silently."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.generation.configuration_utils import ContinuousBatchingConfig

from .config import EngineConfig
from .errors import RequestError
from .sampling_params import derived_seed

HEEDED = ("return_logprobs", "seed", "max_queue_size", "scheduler_type")
"""Fields that mean here what they mean there."""

SIZES = {
    "num_blocks": "cache_tokens",
    "max_batch_tokens": "max_batch_tokens",
    "max_memory_percent": "memory_fraction",
    "max_requests_per_batch": "max_requests",
    "use_cuda_graph": "cuda_graphs",
}
"""Fields that size an engine, and the fields of EngineConfig that they become (`num_blocks` times `page_size`)."""

WITHOUT_EFFECT = frozenset(
    (
        # How transformers lays out and runs its batches: nothing that comes out depends on them.
        *("page_size", "max_blocks_per_request", "allow_block_sharing", "use_async_batching"),
        *("q_padding_interval_size", "kv_padding_interval_size", "safety_margin"),
        *("varlen_compile_config", "decode_compile_config", "default_compile_level"),
        *("auto_switch_to_flash", "cpu_offload_space", "cpu_offload_space_safety_threshold"),
        *("disable_nccl_graph_mixing", "cpu_group_timeout"),
        *("use_default_compile_configs", "max_cached_graphs", "block_size"),
        # Each request always has its own processors here, and none is ever dropped.
        *("per_request_processors", "drop_unsupported_processors"),
    )
)


def check(config: Any) -> ContinuousBatchingConfig | None:
    """The config if it is one and asks for nothing that there is not; else a RequestError."""
    if config is None:
        return None
    if not isinstance(config, ContinuousBatchingConfig):
        raise RequestError(
            f"continuous_batching_config={config!r} is a {type(config).__name__}: give a "
            "ContinuousBatchingConfig of transformers, or leave it out"
        )
    if config.scheduler_type != "fifo":
        raise RequestError(
            f"scheduler_type={config.scheduler_type!r} is not supported: requests are served in "
            "order of arrival, as 'fifo' says"
        )
    for name, value in vars(config).items():
        if name not in (*HEEDED, *SIZES) and name not in WITHOUT_EFFECT:
            raise RequestError(f"{name}={value!r} of continuous_batching_config is not supported")
    return config


def sized(config: ContinuousBatchingConfig | None, base: EngineConfig) -> EngineConfig:
    """`base` with the sizes that the config gives; a size that cannot be is a RequestError."""
    if config is None:
        return base
    changes: dict[str, Any] = {}
    for theirs, ours in SIZES.items():
        value = getattr(config, theirs)
        if value is not None:
            changes[ours] = value
    if "cache_tokens" in changes:
        changes["cache_tokens"] = config.num_blocks * config.page_size
        changes["memory_fraction"] = None
    elif "memory_fraction" in changes:
        changes["cache_tokens"] = None
    if isinstance(config.use_cuda_graph, tuple):
        changes["cuda_graphs"] = config.use_cuda_graph[
            1
        ]  # of decode steps, which are recorded here
    if "max_batch_tokens" in changes:
        changes["chunk_size"] = min(base.chunk_size, changes["max_batch_tokens"])
    try:
        return dataclasses.replace(base, **changes)
    except ValueError as error:
        raise RequestError(f"continuous_batching_config: {error}") from error


def fields_of(config: Any, engine_config: EngineConfig, count: int) -> dict[str, Any]:
    """What the config says of `count` requests, as keywords of an engine with sizes of its own.

    Sizes other than the engine's are a RequestError that names what to give instead.
    """
    checked = check(config)
    if checked is None:
        return {}
    wanted = sized(checked, engine_config)
    for field in dataclasses.fields(EngineConfig):
        asked, has = getattr(wanted, field.name), getattr(engine_config, field.name)
        if asked != has:
            raise RequestError(
                f"continuous_batching_config asks for {field.name}={asked}, and this engine has "
                f"{has}: make it with that, or leave it out"
            )
    return request_fields(checked, range(count))


def request_fields(config: ContinuousBatchingConfig, indices: range) -> dict[str, Any]:
    """What the config says of a session's requests with these numbers."""
    fields: dict[str, Any] = {"logprobs": config.return_logprobs}
    if config.seed is not None:
        fields["seed"] = [derived_seed(config.seed, index) for index in indices]
    return fields
