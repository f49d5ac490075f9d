"""What Prometheus scrapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from regraft.runtime.asynchronous import AsyncEngine
from regraft.runtime.request import Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTED = ("num_preemptions", "computed_tokens", "prefix_queried_tokens", "prefix_hit_tokens")


class Metrics:
    """Counts of one server, and the engine's own numbers as they are when it is scraped."""

    def __init__(self, served: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "regraft_http_calls",
            "Calls by path and status",
            ["path", "status"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "regraft_tokens", "Tokens of ended requests", ["kind"], registry=self.registry
        )
        self._ends = Counter(
            "regraft_requests", "Ended requests by reason", ["reason"], registry=self.registry
        )
        self._first = self._histogram("regraft_first_token_seconds", "Until a first token is made")
        self._whole = self._histogram("regraft_request_seconds", "Until a request has ended")
        self.registry.register(_EngineNumbers(served))

    def called(self, path: str, status: int) -> None:
        """Notes an answer."""
        self._calls.labels(path, status).inc()

    def first_token(self, seconds: float) -> None:
        """Notes how long a first token took."""
        self._first.observe(seconds)

    def ended(self, request: Request, seconds: float) -> None:
        """Notes a request that has ended, or whose client has gone."""
        output = request.output
        self._ends.labels("cancelled" if output is None else output.finish_reason).inc()
        self._tokens.labels("prompt").inc(request.num_prompt)
        self._tokens.labels("generated").inc(request.num_output)
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, buckets=_SECONDS, registry=self.registry)


class _EngineNumbers(Collector):
    def __init__(self, served: AsyncEngine) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        stats = dataclasses.asdict(self._served.engine.stats)
        yield from _of_pools(stats.pop("pools"))
        for name, value in stats.items():
            title = name.removeprefix("num_").replace("_", " ")
            kind = CounterMetricFamily if name in _COUNTED else GaugeMetricFamily
            yield kind(f"regraft_engine_{name.removeprefix('num_')}", title, value=value)
        steps = self._served.engine.background.num_steps
        yield CounterMetricFamily("regraft_engine_steps", "steps", value=steps)


def _of_pools(pools: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    for name in ("num_pages", "free_pages", "cached_pages"):
        title = f"{name.replace('_', ' ')} of rows that are read so far back"
        metric = GaugeMetricFamily(f"regraft_pool_{name}", title, labels=["reach"])
        for pool in pools:
            metric.add_metric([pool["reach"]], pool[name])
        yield metric
