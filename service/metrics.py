"""What Prometheus sees. Every series that can be named beforehand is there, at zero, before the first request."""

from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from service.machine import memory_limit
from service.versions import version

if TYPE_CHECKING:
    from collections.abc import Iterator

REJECTIONS = ("overloaded", "too_large", "deadline", "disconnected", "draining", "invalid")
STAGES = ("tokenize", "queue", "forward", "encode")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Metrics:
    """All metrics, in a registry of their own, so that a process (a test) may have several."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()  # a second series for each, which nobody reads
        self.registry = registry or CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("attend_requests", "Requests answered", ["route", "status"])
        self.request_seconds = histogram(
            "attend_request_duration_seconds", "From the request's head to the answer's last byte", ["route"], buckets=_SECONDS
        )
        self.stage_seconds = histogram(
            "attend_stage_duration_seconds", "Time in a stage of a request", ["model", "stage"], buckets=_SECONDS
        )
        self.queue_texts = gauge("attend_queue_texts", "Texts accepted and not yet in a forward", ["model"])
        self.queue_tokens = gauge("attend_queue_tokens", "Tokens accepted and not yet in a forward", ["model"])
        self.inflight = gauge("attend_inflight_requests", "Requests being answered")
        self.batch_texts = histogram("attend_batch_texts", "Texts in a forward", ["model"], buckets=_TEXTS)
        self.batch_tokens = histogram("attend_batch_tokens", "Tokens in a forward", ["model"], buckets=_TOKENS)
        self.tokens = counter("attend_tokens", "Tokens that went through a forward", ["model"])
        self.texts = counter("attend_texts", "Texts that went through a forward", ["model"])
        self.attention_values = counter("attend_attention_values", "Attention weights handed out", ["model"])
        self.response_bytes = counter("attend_response_bytes", "Bytes of answers' bodies", ["route"])
        self.rejected = counter("attend_rejected", "Requests that got no answer from a model, by reason", ["reason"])
        self.nonfinite = counter("attend_nonfinite", "Texts for which the model gave numbers that are not finite", ["model"])
        self.model_ready = gauge("attend_model_ready", "1: the model is loaded", ["model"])
        self.worker_up = gauge("attend_worker_up", "1: the model's worker runs", ["model"])
        self.worker_restarts = counter("attend_worker_restarts", "Times that a worker was started again", ["model"])
        self.build_info = gauge("attend_build_info", "1; the labels say what runs", ["version", "torch", "transformers"])
        self.model_info = gauge(
            "attend_model_info", "1; the labels say how a model is served", ["model", "architecture", "path", "dtype", "device"]
        )
        self.memory_limit = gauge("attend_memory_limit_bytes", "What the process may hold: the container's limit, or the machine's memory")
        self.memory_limit.set(memory_limit())
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def prepare(self, models: Iterable[str], routes: Iterable[str]) -> None:
        """Make the series of these models and routes, at zero."""
        for model in models:
            for metric in (
                self.queue_texts, self.queue_tokens, self.batch_texts, self.batch_tokens, self.tokens, self.texts,
                self.attention_values, self.nonfinite, self.model_ready, self.worker_up, self.worker_restarts,
            ):  # fmt: skip
                metric.labels(model)
            for stage in STAGES:
                self.stage_seconds.labels(model, stage)
        for route in routes:
            self.requests.labels(route, "200")
            self.request_seconds.labels(route)
            self.response_bytes.labels(route)
        for reason in REJECTIONS:
            self.rejected.labels(reason)
        self.build_info.labels(*(version(name) for name in ("attend", "torch", "transformers"))).set(1)

    @contextmanager
    def stage(self, model: str, stage: str) -> "Iterator[None]":
        """Time a stage of a request."""
        start = perf_counter()
        yield
        self.stage_seconds.labels(model, stage).observe(perf_counter() - start)
