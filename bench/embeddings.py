"""Embeddings: the loads that servers are compared under, the bare forward and its limit, bfloat16."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import servers
from bench.servers import Contestant, Running, Unavailable
from bench.table import Figures, Run, cosine
from bench.texts import Text, make

ATTEND, INFINITY, BARE, ONNX = "attend", "Infinity", "the bare packed forward", "ONNX Runtime's bare padded forward"
MEGAFLOPS = 21.3
"""Multiplications and additions of the default model's matrix products for one token, in millions."""


@dataclass(frozen=True)
class Load:
    """So many texts of a kind, `size` a request, from so many clients; the goals for our speed (one at a time: our p50) by peer."""

    name: str
    kind: str
    count: int
    size: int
    clients: int
    goals: dict[str, str]

    def texts(self, seed: int, quick: bool = False) -> list[Text]:
        """The texts of one round."""
        return make(self.kind, max(self.size * self.clients, self.count // (2 if quick else 1)), seed)


LONE = Load("short texts, one at a time", "short", 120, 1, 1, {INFINITY: "≤ 0.4"})
SHORT = Load("short texts, 32 clients", "short", 640, 1, 32, {INFINITY: "≥ 2.5"})
MIX = Load("mix, 32 clients", "mix", 256, 1, 32, {INFINITY: "≥ 4", BARE: "≥ 0.85", ONNX: "> 1"})
MIX32 = Load("mix, 32 a request, 4 clients", "mix", 512, 32, 4, {INFINITY: "≥ 3", BARE: "≥ 0.9"})
LONG = Load("long texts, 8 a request, 2 clients", "long", 64, 8, 2, {INFINITY: "≥ 1.4"})
LOADS = (LONE, SHORT, MIX, MIX32, LONG)


def loads(run: Run) -> None:
    """All loads, for everybody who can be had here."""
    with ExitStack() as stack:
        field: dict[str, Contestant] = {
            ATTEND: stack.enter_context(servers.running(servers.attend())),
            BARE: stack.enter_context(servers.bounds()),
        }
        missing: dict[str, str] = {}
        for name, start in ((INFINITY, servers.infinity), (ONNX, servers.onnx)):
            try:
                field[name] = stack.enter_context(start())
            except Unavailable as error:
                missing[name] = str(error)
        same_vectors(field, missing)
        for load in LOADS:
            run.begin(load.name)
            report(run, load, rounds(run, load, field, missing), missing)
        peak = {name: one.memory("VmHWM") for name, one in field.items() if isinstance(one, Running)}
        theirs = peak.get(INFINITY)
        run.add("peak memory of all this", f"{peak[ATTEND]:.0f} MB", INFINITY, f"{theirs:.0f} MB" if theirs else "-",
                peak[ATTEND] / theirs if theirs else None)  # fmt: skip
        run.notes += [f"not measured: {name}: {reason}" for name, reason in missing.items()]


def same_vectors(field: dict[str, Contestant], missing: dict[str, str]) -> None:
    """Everybody must compute the same thing, or speed means nothing: who does not, is left out. Raises Unavailable when it is us."""
    texts = [t.text for t in make("mix", 16, 99)]
    expected = field[BARE].vectors(texts)
    for name, contestant in list(field.items()):
        least = min(cosine(a, b) for a, b in zip(contestant.vectors(texts), expected, strict=True))
        if least < 0.9999:
            missing[name] = f"gives other vectors, cosine {least:.5f}"
            del field[name]
    if ATTEND in missing:
        raise Unavailable(f"{ATTEND} {missing[ATTEND]}")


def rounds(run: Run, load: Load, field: dict[str, Contestant], missing: dict[str, str]) -> dict[str, Figures]:
    """One load for everybody, round by round, each time with another one first; round 0, to get warm, is not counted."""
    seen = {name: Figures() for name in field}
    for number in range(run.rounds + 1):
        texts = load.texts(1000 * LOADS.index(load) + number, run.quick)
        run.neighbours.wait()
        names = list(field)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            try:
                outcome = field[name].embed([t.text for t in texts], load.size, load.clients)
            except Unavailable as error:
                if name == ATTEND:
                    raise
                missing[name] = str(error)
                del field[name]
                continue
            if number:
                seen[name].rounds.append((sum(t.tokens for t in texts), outcome))
    return {name: figures for name, figures in seen.items() if name in field}


def report(run: Run, load: Load, seen: dict[str, Figures], missing: dict[str, str]) -> None:
    """The lines of one load."""
    ours = seen[ATTEND]
    for name in (INFINITY, BARE, ONNX):
        theirs, goal = seen.get(name), load.goals.get(name, "-")
        if theirs is None:
            run.add(load.name, str(ours), name, f"not measured: {missing[name][:60]}", None, goal)
        elif load is LONE:
            run.add(load.name, str(ours), f"{name}, p50", str(theirs), ours.p50 / theirs.p50, goal)
        else:
            text = str(theirs) if name == INFINITY else f"{theirs.speed:.0f} tok/s"
            run.add(load.name, str(ours), name, text, ours.speed / theirs.speed, goal)
    if load is LONE:
        bound = seen[BARE].p50 + 1.5
        run.add(load.name, f"p50 {ours.p50:.2f} ms", f"{BARE} + 1.5 ms", f"{bound:.2f} ms", ours.p50 / bound, "≤ 1")


def forward(run: Run) -> None:
    """The bare packed forward against what the processor's matrix products allow, and what recording costs it."""
    with servers.bounds() as bounds:
        run.begin("the bare packed forward")
        run.neighbours.wait()
        texts = make("mix", 256, 77)
        took = bounds.ask({"what": "ceiling", "texts": [t.text for t in texts], "times": run.rounds + 1})
        speed, limit = sum(t.tokens for t in texts) / took["seconds"], 1000 * took["gflops"] / MEGAFLOPS
        run.add("the bare packed forward", f"{speed:.0f} tok/s", f"matrix products, {took['gflops']:.0f} GFLOP/s", f"{limit:.0f} tok/s",
                speed / limit, "≥ 0.75")  # fmt: skip
        run.begin("the recording code")
        run.neighbours.wait()
        code = bounds.ask({"what": "recording", "texts": [t.text for t in make("mix", 32, 5)], "times": 2 * run.rounds + 1})
        bare, same = f"{1000 * code['absent']:.1f} ms", "the same bits" if code["same"] else "OTHER BITS"
        run.add("embeddings with the recording code", f"{1000 * code['present']:.1f} ms, {same}", "without it", bare,
                code["present"] / code["absent"] if code["same"] else 99.0, "≤ 1.05")  # fmt: skip
        run.add("the last layer's attention too, in process", f"{1000 * code['last']:.1f} ms", "the forward without",
                f"{1000 * code['present']:.1f} ms", code["last"] / code["present"], "≤ 1.25")  # fmt: skip


def bfloat16(run: Run) -> None:
    """Our bfloat16 against our float32, on processors that compute with it; the goal for its speed is for those with AMX."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text().split() if cpu.exists() else []
    if not {"amx_bf16", "avx512_bf16", "bf16"} & set(flags):
        raise Unavailable("this processor does not compute with bfloat16")
    amx = "amx_bf16" in flags
    with servers.running(servers.attend()) as exact, servers.running(servers.attend("--dtype", "bfloat16", name="attend-bf16")) as half:
        run.begin("mix, 32 clients, bfloat16")
        texts = [t.text for t in make("mix", 32, 98)]
        least = min(cosine(a, b) for a, b in zip(exact.vectors(texts), half.vectors(texts), strict=True))
        seen = rounds(run, MIX, {ATTEND: exact, "bfloat16": half}, {})
        run.add("mix, 32 clients, bfloat16", str(seen["bfloat16"]), "our float32", str(seen[ATTEND]),
                seen["bfloat16"].speed / seen[ATTEND].speed, "≥ 2" if amx else "-")  # fmt: skip
        run.add("bfloat16 vectors", f"least cosine {least:.5f}", "our float32", "1", least, "≥ 0.999")
    if not amx:
        run.notes.append("no goal for the speed of bfloat16 here: the processor has no AMX")
