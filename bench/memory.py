"""Memory: under full answers to slow work, at full load, and after thousands of requests."""

import json
import time

from bench import servers
from bench.servers import Running
from bench.table import Run
from bench.texts import make
from service.leftovers import AFTER

CLIENTS = 8


def memory(run: Run) -> None:
    """All lines about memory."""
    full_answers(run)
    many_requests(run)


def idle(own: Running) -> float:
    """Megabytes of a service that has answered a few texts, and does nothing."""
    own.send([json.dumps({"text": t.text, "include": ["pooled"]}) for t in make("full", 8, 3)], 1, "/attend")
    own.forget_peak()
    return own.memory("VmRSS")


def at_rest(own: Running) -> float:
    """Megabytes when what the work left has gone back to the system."""
    time.sleep(AFTER + 2)
    return own.memory("VmRSS")


def full_answers(run: Run) -> None:
    """The most memory that full answers take while 8 clients read them, against the tensors of 8 answers."""
    run.begin("peak memory, 8 clients")
    with servers.running(servers.attend()) as own:
        before = idle(own)
        texts = make("full", 8, 3) * (2 if run.quick else 6)
        own.send([json.dumps({"text": t.text, "layers": "all"}) for t in texts], CLIENTS, "/attend")
        above = own.memory("VmHWM") - before
    tensors = CLIENTS * (6 * 12 * 256 * 256 + 257 * 384) * 4 / 2**20
    run.add("peak memory, 8 clients, 256 tokens, everything", f"{above:.0f} MB above idle", "the answers' tensors", f"{tensors:.0f} MB",
            above / tensors, "≤ 1.5")  # fmt: skip


def many_requests(run: Run) -> None:
    """32 clients, the mix; of four requests three want the pooled vector and one all of the last layer. What stays is looked at at rest."""
    warm, count = (200, 400) if run.quick else (2000, 10_000)
    run.begin(f"memory, {warm + count} mixed requests")
    with servers.running(servers.attend()) as own:
        before = idle(own)
        bodies = [
            json.dumps({"text": t.text, **({} if i % 4 == 3 else {"include": ["pooled"]})}) for i, t in enumerate(make("mix", count, 8))
        ]
        own.send(bodies[:warm], 32, "/attend")
        settled = at_rest(own)
        own.send(bodies, 32, "/attend")
        after, peak = at_rest(own), own.memory("VmHWM")
    run.add("peak memory, 32 clients, mixed requests", f"{peak:.0f} MB", "idle", f"{before:.0f} MB", peak / before, "≤ 1.5")
    run.add(f"memory after {count} mixed requests", f"{after:.0f} MB", f"after the first {warm}", f"{settled:.0f} MB", after / settled,
            "≤ 1.05")  # fmt: skip
