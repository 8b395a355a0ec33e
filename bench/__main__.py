"""`make bench`: this service against Infinity, ONNX Runtime, the obvious service and its own bounds, in one run, as one table.

Every figure is the median of several rounds; in a round each server gets the same load, one after the other, while the others
wait. Ratios are what the table is for: the seconds are this machine's.
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import servers
from bench.client import Outcome
from bench.servers import MODEL, Running, Unavailable, Worker
from bench.texts import Text, make


@dataclass(frozen=True)
class Line:
    """One line of the table: a figure of ours, what it is compared with, and the goal for their ratio."""

    what: str
    ours: str
    against: str
    theirs: str
    ratio: float | None
    goal: str

    @property
    def met(self) -> str:
        """Whether the ratio reaches the goal."""
        if self.ratio is None:
            return "not measured"
        sign, number = self.goal.split()
        reached = {"≥": self.ratio >= float(number), "≤": self.ratio <= float(number), ">": self.ratio > float(number)}[sign]
        return "yes" if reached else "no"


@dataclass(frozen=True)
class Embeddings:
    """A load of embeddings: so many texts of a kind, `size` a request, from so many clients."""

    name: str
    kind: str
    count: int
    size: int
    clients: int

    def texts(self, seed: int, quick: bool) -> list[Text]:
        """The texts of one round."""
        return make(self.kind, max(self.size * self.clients, self.count // (2 if quick else 1)), seed)

    def bodies(self, texts: list[Text]) -> list[str]:
        """OpenAI's request for each `size` of the texts."""
        groups = [texts[i : i + self.size] for i in range(0, len(texts), self.size)]
        return [json.dumps({"model": MODEL, "input": [t.text for t in group]}) for group in groups]


LONE = Embeddings("short texts, one at a time", "short", 120, 1, 1)
SHORT = Embeddings("short texts, 32 clients", "short", 640, 1, 32)
MIX = Embeddings("mix, 32 clients", "mix", 160, 1, 32)
MIX32 = Embeddings("mix, 32 a request, 4 clients", "mix", 256, 32, 4)
LONG = Embeddings("long texts, 8 a request, 2 clients", "long", 32, 8, 2)
LOADS = (LONE, SHORT, MIX, MIX32, LONG)


@dataclass
class Figures:
    """What was seen of one server under one load, a number for each round."""

    tokens_per_second: list[float]
    p50: list[float]
    p99: list[float]

    def note(self, tokens: int, outcome: Outcome) -> None:
        """Add a round."""
        self.tokens_per_second.append(tokens / outcome.seconds)
        self.p50.append(1000 * median(outcome.latencies))
        self.p99.append(1000 * quantiles(outcome.latencies, n=100, method="inclusive")[98])

    def __str__(self) -> str:
        return f"{median(self.tokens_per_second):.0f} tok/s, p50 {median(self.p50):.1f} ms, p99 {median(self.p99):.1f} ms"


class Run:
    """One run of the benchmark."""

    def __init__(self, rounds: int, quick: bool) -> None:
        self.rounds, self.quick = rounds, quick
        self.lines: list[Line] = []
        self.notes: list[str] = []

    def add(self, what: str, ours: str, against: str, theirs: str, ratio: float | None, goal: str) -> None:
        """Add a line to the table."""
        self.lines.append(Line(what, ours, against, theirs, ratio, goal))

    # ── Embeddings ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def embeddings(self) -> None:
        """All loads of embeddings: ours, Infinity, the bare forward, ONNX Runtime."""
        with ExitStack() as stack:
            own = stack.enter_context(servers.running(servers.attend()))
            peers: dict[str, Running] = {}
            onnx: Worker | None = None
            try:
                python = servers.peers_python()
                peers["Infinity"] = stack.enter_context(servers.running(servers.infinity()))
                onnx = Worker(python, "-m", "bench.onnx_forward", servers.MODEL_FOLDER)
                stack.callback(onnx.close)
            except Unavailable as error:
                self.notes.append(f"not measured: {error}")
            bounds = Worker(sys.executable, "-m", "bench.inprocess", "float32")
            stack.callback(bounds.close)
            self.same_vectors(own, peers, bounds)
            for load in LOADS:
                self.one_load(load, own, peers, bounds, onnx)
            flops = 1e9 * bounds.ask({"what": "gflops"}) / 21.3e6
            bare = [t.tokens for t in make("mix", 256, 77)]
            seconds = min(bounds.ask({"what": "packed", "texts": [t.text for t in make("mix", 256, 77)]}) for _ in range(self.rounds))
            speed = sum(bare) / seconds
            self.add("the bare packed forward", f"{speed:.0f} tok/s", "matrix products", f"{flops:.0f} tok/s", speed / flops, "≥ 0.75")
            code = bounds.ask({"what": "recording_code", "texts": [t.text for t in make("mix", 32, 5)]})
            same = "the same bits" if code["same"] else "OTHER BITS"
            self.add("embeddings with the recording code", f"{1000 * code['present']:.1f} ms, {same}", "without it",
                     f"{1000 * code['absent']:.1f} ms", code["present"] / code["absent"] if code["same"] else 9.9, "≤ 1.05")  # fmt: skip
            memory = {own.spec.name: own, **{p.spec.name: p for p in peers.values()}}
            self.notes.append("peak memory: " + ", ".join(f"{name} {server.memory('VmHWM'):.0f} MB" for name, server in memory.items()))

    def same_vectors(self, own: Running, peers: dict[str, Running], bounds: Worker) -> None:
        """Everybody must compute the same thing, or speed means nothing. Raises Unavailable."""
        texts = [t.text for t in make("mix", 16, 99)]
        expected = bounds.ask({"what": "vectors", "texts": texts})
        for server in (own, *peers.values()):
            got = [item["embedding"] for item in server.post({"model": MODEL, "input": texts, "encoding_format": "float"})["data"]]
            least = min(cosine(a, b) for a, b in zip(got, expected, strict=True))
            if least < 0.9999:
                raise Unavailable(f"{server.spec.name} gives other vectors: cosine {least:.5f}")

    def one_load(self, load: Embeddings, own: Running, peers: dict[str, Running], bounds: Worker, onnx: Worker | None) -> None:
        """One load for everybody, round by round; the first is to get warm."""
        seen = {name: Figures([], [], []) for name in ("attend", *peers)}
        bare, padded, lone = Figures([], [], []), Figures([], [], []), []
        for number in range(self.rounds + 1):
            texts = load.texts(1000 * LOADS.index(load) + number, self.quick)
            plain, tokens = [t.text for t in texts], sum(t.tokens for t in texts)
            outcomes = {name: server.send(load.bodies(texts), load.clients) for name, server in {"attend": own, **peers}.items()}
            packed = bounds.ask({"what": "lone" if load is LONE else "packed", "texts": plain})
            unpacked = onnx.ask(plain) if onnx is not None and load is MIX else None
            if number == 0:
                continue
            for name, outcome in outcomes.items():
                seen[name].note(tokens, outcome)
            if load is LONE:
                lone.append(1000 * packed)
            else:
                bare.tokens_per_second.append(tokens / packed)
            if unpacked is not None:
                padded.tokens_per_second.append(tokens / unpacked)
        self.report(load, seen, bare, padded, lone)

    def report(self, load: Embeddings, seen: dict[str, Figures], bare: Figures, padded: Figures, lone: list[float]) -> None:
        """The lines of one load."""
        ours, infinity = seen["attend"], seen.get("Infinity")
        goals = {SHORT: "≥ 2.5", MIX: "≥ 4", MIX32: "≥ 3", LONG: "≥ 1.4"}
        if load is LONE:
            mine = median(ours.p50)
            self.add(load.name, str(ours), "Infinity's p50", str(infinity), mine / median(infinity.p50) if infinity else None, "≤ 0.4")
            self.add(
                load.name,
                f"p50 {mine:.2f} ms",
                "bare forward + 1.5 ms",
                f"{median(lone):.2f} ms + 1.5 ms",
                mine / (median(lone) + 1.5),
                "≤ 1",
            )
            return
        speed = median(ours.tokens_per_second)
        self.add(
            load.name, str(ours), "Infinity", str(infinity), speed / median(infinity.tokens_per_second) if infinity else None, goals[load]
        )
        if load in (MIX, MIX32):
            bound = median(bare.tokens_per_second)
            self.add(
                load.name,
                f"{speed:.0f} tok/s",
                "the bare packed forward",
                f"{bound:.0f} tok/s",
                speed / bound,
                "≥ 0.85" if load is MIX else "≥ 0.9",
            )
        if load is MIX:
            other = median(padded.tokens_per_second) if padded.tokens_per_second else None
            self.add(load.name, f"{speed:.0f} tok/s", "ONNX Runtime's bare padded forward", f"{other:.0f} tok/s" if other else "-",
                     speed / other if other else None, "> 1")  # fmt: skip

    # ── bfloat16 ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def bfloat16(self) -> None:
        """Where the processor has AMX: our bfloat16 against our float32."""
        if "amx_bf16" not in Path("/proc/cpuinfo").read_text():
            self.notes.append("not measured: bfloat16, the processor has no AMX")
            return
        with servers.running(servers.attend()) as exact, servers.running(servers.attend("--dtype", "bfloat16", name="attend-bf16")) as half:
            texts = [t.text for t in make("mix", 32, 98)]
            body = {"model": MODEL, "input": texts, "encoding_format": "float"}
            vectors = [[item["embedding"] for item in server.post(body)["data"]] for server in (exact, half)]
            least = min(cosine(a, b) for a, b in zip(*vectors, strict=True))
            seen = {"float32": Figures([], [], []), "bfloat16": Figures([], [], [])}
            for number in range(self.rounds + 1):
                load = MIX.texts(5000 + number, self.quick)
                for name, server in (("float32", exact), ("bfloat16", half)):
                    outcome = server.send(MIX.bodies(load), MIX.clients)
                    if number:
                        seen[name].note(sum(t.tokens for t in load), outcome)
            speeds = [median(figures.tokens_per_second) for figures in seen.values()]
            self.add("mix, 32 clients, bfloat16", str(seen["bfloat16"]), "our float32", str(seen["float32"]), speeds[1] / speeds[0], "≥ 2")
            self.add("bfloat16 vectors", f"least cosine {least:.5f}", "our float32", "1", least, "≥ 0.999")

    # ── The wire ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def wire(self) -> None:
        """Attention: everything, little of it, as text and as bytes."""
        full, short = [t.text for t in make("full", 8, 3)], [t.text for t in make("short", 40, 3)]
        everything = {"layers": "all"}
        bounds = Worker(sys.executable, "-m", "bench.inprocess", "float32")
        with ExitStack() as stack:
            stack.callback(bounds.close)
            own = stack.enter_context(servers.running(servers.attend()))
            obvious = stack.enter_context(servers.running(servers.obvious()))

            def ours(texts: list[str], accept: str = "application/json", **fields: Any) -> float:
                bodies = [json.dumps({"text": text, **fields}) for text in texts]
                return median(own.send(bodies, 1, "/attend", {"accept": accept}).latencies)

            ours(full[:2], **everything)
            json_seconds = median([ours(full, **everything) for _ in range(self.rounds)])
            bodies = [json.dumps({"text": text}) for text in full[: 1 if self.quick else 2]]
            for path, name, goal in (("/attend", "the obvious service", "≥ 100"), ("/typed", "the same with a typed answer", "≥ 1")):
                theirs = median(obvious.send(bodies, 1, path).latencies)
                self.add("256 tokens, all layers and heads, JSON", f"{1000 * json_seconds:.0f} ms", name, f"{1000 * theirs:.0f} ms",
                         theirs / json_seconds, goal)  # fmt: skip
            bounds.ask({"what": "recorded", "texts": full[:2]})
            pairs = [
                (ours(full, "application/x-safetensors", **everything), bounds.ask({"what": "recorded", "texts": full}))
                for _ in range(self.rounds)
            ]
            mine, bound = (median(column) for column in zip(*pairs, strict=True))
            self.add(
                "the same as safetensors",
                f"{1000 * mine:.1f} ms",
                "forward with recording + one copy",
                f"{1000 * bound:.1f} ms",
                mine / bound,
                "≤ 1.3",
            )
            for decimals, goal in ((6, "≥ 2.5"), (4, "≥ 4")):
                took = bounds.ask({"what": "wire", "decimals": decimals})
                self.add(f"JSON numbers, {decimals} decimals", f"{took['ours']:.1f} ns", "orjson", f"{took['orjson']:.1f} ns",
                         took["orjson"] / took["ours"], goal)  # fmt: skip
            embeddings = {"include": ["pooled", "embeddings"]}
            for what, texts, fields, goal in (
                ("last layer, all heads, short text", short, {}, "≤ 1.2"),
                ("focus on one word, all layers and heads, 256 tokens", full, {"focus": {"start": 4, "end": 9}, "layers": "all"}, "≤ 1.5"),
            ):
                ours(texts[:4], **fields)
                rounds = [(ours(texts, **fields), ours(texts, **embeddings)) for _ in range(self.rounds)]
                mine, bare = (median(column) for column in zip(*rounds, strict=True))
                self.add(what, f"{1000 * mine:.2f} ms", "embeddings alone", f"{1000 * bare:.2f} ms", mine / bare, goal)
        self.memory(full)

    def memory(self, full: list[str]) -> None:
        """The most memory that full answers take while 8 clients read them, against the tensors of 8 answers."""
        with servers.running(servers.attend()) as own:
            own.send([json.dumps({"text": text, "include": ["pooled"]}) for text in full], 1, "/attend")
            idle = own.memory("VmRSS")
            own.forget_peak()
            own.send([json.dumps({"text": text, "layers": "all"}) for text in full * (2 if self.quick else 4)], 8, "/attend")
            above = own.memory("VmHWM") - idle
            tensors = 8 * (6 * 12 * 256 * 256 + 257 * 384) * 4 / 2**20
            mine, theirs = f"{above:.0f} MB above idle", f"{tensors:.0f} MB"
            self.add("peak memory, 8 clients, 256 tokens, everything", mine, "the answers' tensors", theirs, above / tensors, "≤ 1.5")


def cosine(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True)) / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def table(lines: list[Line]) -> str:
    """The lines as a table that is also Markdown."""
    rows = [("what", "attend", "against", "", "ratio", "goal", "met")]
    rows += [(x.what, x.ours, x.against, x.theirs, "-" if x.ratio is None else f"{x.ratio:.2f}", x.goal, x.met) for x in lines]
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def main() -> None:
    """Run, and print the table."""
    parts: dict[str, Callable[[Run], None]] = {"embeddings": Run.embeddings, "bfloat16": Run.bfloat16, "wire": Run.wire}
    arguments = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    arguments.add_argument("--only", nargs="+", choices=list(parts), default=list(parts), help="which parts to run")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of each load, after one to get warm")
    arguments.add_argument("--quick", action="store_true", help="one round of smaller loads: to see that it works")
    arguments.add_argument("--json", type=Path, help="also write the lines to this file")
    given = arguments.parse_args()
    run = Run(1 if given.quick else given.rounds, given.quick)
    for name in given.only:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        try:
            parts[name](run)
        except Unavailable as error:
            run.notes.append(f"not measured: {name}: {error}")
    print(table(run.lines))
    print("".join(f"\n{note}" for note in run.notes))
    if given.json:
        given.json.write_text(json.dumps([{**asdict(line), "met": line.met} for line in run.lines], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
