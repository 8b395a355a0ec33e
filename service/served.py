"""The served models: each is loaded in the background, then has a reader, facts, and a scheduler with a worker of its own.

torch and everything that needs it are imported in the loading thread, so that the service answers from its first second.
"""

import asyncio
import difflib
import gc
import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from models.names import served_name
from models.values import Encoding, Passage, Probe
from service import errors
from service.machine import cores
from service.metrics import Metrics
from service.scheduler import Scheduler
from service.settings import Settings

if TYPE_CHECKING:
    from models.encoder import Encoder, Facts
    from models.passages import Reader

log = logging.getLogger(__name__)
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens in a forward. On two cores, the mix of 32 clients: 1024 gave 4,190 tokens/s and a p99 of 0.75 s, 2048 4,520 and 0.53 s,
4096 4,520 and 0.59 s, 8192 4,240 and 0.57 s."""


class Served:
    """One model that answers requests."""

    def __init__(self, name: str, encoder: "Encoder", reader: "Reader", scheduler: Scheduler) -> None:
        self.name, self.encoder, self.reader, self.scheduler = name, encoder, reader, scheduler

    @property
    def facts(self) -> "Facts":
        """What is known of it."""
        return self.encoder.facts


class Models:
    """All models of the process, by name and alias, loaded or not."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.names = [served_name(spec) for spec in settings.model]
        self.aliases = dict(alias.split("=", 1) for alias in settings.alias)
        self._served: dict[str, Served] = {}
        self.failure: str | None = None

    # ── Asking ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, name: str | None) -> Served:
        """The model of that name or alias; the first one without a name. Raises AttendError: 404, or 503 while it is loaded."""
        wanted = self.names[0] if name is None else self.aliases.get(name, name)
        if wanted not in self.names:
            raise errors.model_not_found(wanted, self.nearest(wanted))
        if wanted not in self._served:
            raise errors.not_ready(wanted)
        return self._served[wanted]

    def nearest(self, name: str) -> list[str]:
        """All names and aliases, the most similar first."""
        known = [*self.names, *self.aliases]
        return sorted(known, key=lambda k: -difflib.SequenceMatcher(None, name.lower(), k.lower()).ratio())

    @property
    def ready(self) -> bool:
        """Whether every model is loaded and its worker runs."""
        return len(self._served) == len(self.names) and all(s.scheduler.up for s in self._served.values())

    @property
    def alive(self) -> bool:
        """Whether no worker is beyond help."""
        return all(served.scheduler.alive for served in self._served.values())

    def loaded(self) -> list[Served]:
        """Those that are loaded, in the order of the settings."""
        return [self._served[name] for name in self.names if name in self._served]

    # ── Loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, failed: Callable[[str], None]) -> None:
        """Load all in a thread of its own; `failed` is called on the event loop with one line when a model cannot be."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                for spec, name in zip(self.settings.model, self.names, strict=True):
                    start = perf_counter()
                    encoder, reader = self._open(spec, name)
                    asyncio.run_coroutine_threadsafe(self._serve(name, encoder, reader), loop).result()
                    log.info("%s is ready after %.1f s: %s on %s, %s", name, perf_counter() - start, encoder.facts.dtype,
                             encoder.facts.device, encoder.facts.path)  # fmt: skip
            except Exception as error:
                if type(error).__name__ != "CheckpointError":
                    log.exception("loading failed")
                if not loop.is_closed():
                    loop.call_soon_threadsafe(failed, str(error))

        threading.Thread(target=work, name="loader", daemon=True).start()

    def _open(self, spec: str, name: str) -> tuple["Encoder", "Reader"]:
        settings = self.settings
        checkpoint = importlib.import_module("models.checkpoint")
        encoder_module = importlib.import_module("models.encoder")
        passages = importlib.import_module("models.passages")
        encoder_module.use_threads(self._threads())
        device = encoder_module.choose_device(settings.device)
        dtype = "float32" if settings.dtype == "auto" and device.type == "cpu" else settings.dtype
        encoder = encoder_module.Encoder(checkpoint.load(spec, dtype), settings.device, settings.max_length, settings.compile)
        if settings.default_prompt and settings.default_prompt not in encoder.facts.prompts:
            known = ", ".join(encoder.facts.prompts) or "none"
            raise checkpoint.CheckpointError(
                f"{name}: there is no prompt {settings.default_prompt!r} for --default-prompt; it has: {known}"
            )
        reader = passages.Reader(encoder.checkpoint.tokenizer, encoder.facts.max_length)
        encoder.encode([encoder.sample], [Probe()])
        return encoder, reader

    def _threads(self) -> int:
        return max(1, (self.settings.threads or cores()) // len(self.names))

    async def _serve(self, name: str, encoder: "Encoder", reader: "Reader") -> None:
        facts, settings = encoder.facts, self.settings
        threads = self._threads()
        first = threading.local()

        def encode(passages: Sequence[Passage], probes: Sequence[Probe]) -> list[Encoding | Exception]:
            if not hasattr(first, "done"):
                importlib.import_module("models.encoder").use_threads(threads)
                first.done = True
            return list(encoder.encode(passages, probes))

        scheduler = Scheduler(
            name, encode, encoder.sample, metrics=self.metrics,
            batch_tokens=settings.max_batch_tokens or BATCH_TOKENS.get(facts.device.partition(":")[0], BATCH_TOKENS["cuda"]),
            queue_tokens=settings.max_queue_tokens, worker_timeout=settings.worker_timeout,
        )  # fmt: skip
        self._served[name] = Served(name, encoder, reader, scheduler)
        if len(self._served) == len(self.names):
            _leave_alone_what_is_loaded()
        self.metrics.model_ready.labels(name).set(1)
        self.metrics.model_info.labels(name, facts.architecture, facts.path, facts.dtype, facts.device).set(1)

    async def close(self) -> None:
        """End the workers."""
        await asyncio.gather(*(served.scheduler.close() for served in self._served.values()))


def _leave_alone_what_is_loaded() -> None:
    """Python's collector, which stops everything, no longer walks through the 400,000 objects of torch and transformers: 0.3 s a time."""
    gc.collect()
    gc.freeze()
