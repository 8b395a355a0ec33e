"""The wire: all attention, little of it, as text and as bytes, against the obvious service and against what the bytes allow."""

import json
from contextlib import ExitStack
from statistics import median
from typing import Any

from bench import servers
from bench.servers import Running, Unavailable, Worker
from bench.table import Run
from bench.texts import make

EVERYTHING = {"layers": "all"}


def wire(run: Run) -> None:
    """All lines about answers with attention."""
    with ExitStack() as stack:
        own = stack.enter_context(servers.running(servers.attend()))
        bounds = stack.enter_context(servers.bounds())
        all_of_it(run, own)
        as_bytes(run, own, bounds)
        numbers(run, bounds)
        little_of_it(run, own)


def took(server: Running, bodies: list[dict[str, Any]], accept: str = "application/json", path: str = "/attend") -> float:
    """Seconds of one such request, the median; one after the other."""
    return median(server.send([json.dumps(body) for body in bodies], 1, path, {"accept": accept}).latencies)


def all_of_it(run: Run, own: Running) -> None:
    """One text of 256 tokens, all layers and heads, as JSON, against the obvious service, which is given one text a round."""
    what = "256 tokens, all layers and heads, JSON"
    run.begin(what)
    bodies = [{"text": t.text} for t in make("full", 8, 3)]
    times: dict[str, list[float]] = {"ours": [], "/attend": [], "/typed": []}
    try:
        with servers.running(servers.obvious()) as obvious:
            same_weights(own, obvious)
            took(own, [body | EVERYTHING for body in bodies])
            for number in range(run.rounds):
                run.neighbours.wait()
                times["ours"].append(took(own, [body | EVERYTHING for body in bodies]))
                for path in ("/attend", "/typed"):
                    times[path].append(took(obvious, [bodies[number % 8]], path=path))
    except Unavailable as error:
        run.notes.append(f"not measured: the obvious service: {error}")
        return run.add(what, "-", "the obvious service", f"not measured: {str(error)[:60]}", None, "≥ 100")
    ours, plain, typed = (median(seconds) for seconds in times.values())
    run.add(what, f"{1000 * ours:.1f} ms", "the obvious service", f"{1000 * plain:.0f} ms", plain / ours, "≥ 100")
    return run.add(what, f"{1000 * ours:.1f} ms", "the same with a typed answer", f"{1000 * typed:.0f} ms", typed / ours)


def same_weights(own: Running, obvious: Running) -> None:
    """Both must give the same attention. Raises Unavailable when they do not."""
    text = make("sentence", 1, 7)[0].text
    ours = own.post({"text": text, **EVERYTHING}, "/attend")["results"][0]["attention"]["weights"]
    theirs = obvious.post({"text": text}, "/attend")["attentions"]
    most = max(abs(a - b) for a, b in zip(flat(ours), flat(theirs), strict=True))
    if most > 1e-4:
        raise Unavailable(f"other weights than ours, by {most:.1e}")


def flat(nested: Any) -> list[float]:
    """All numbers of nested lists."""
    return [number for inner in nested for number in flat(inner)] if isinstance(nested, list) else [nested]


def as_bytes(run: Run, own: Running, bounds: Worker) -> None:
    """The same as safetensors, against the forward with recording in process, and one copy of the bytes."""
    run.begin("the same as safetensors")
    texts = [t.text for t in make("full", 8, 3)]
    pairs = []
    for number in range(run.rounds + 1):
        run.neighbours.wait()
        mine = took(own, [{"text": text, **EVERYTHING} for text in texts], "application/x-safetensors")
        bound = bounds.ask({"what": "recorded", "texts": texts})
        pairs += [(mine, bound)] if number else []
    mine, bound = (median(column) for column in zip(*pairs, strict=True))
    run.add("the same as safetensors", f"{1000 * mine:.1f} ms", "forward with recording + one copy", f"{1000 * bound:.1f} ms",
            mine / bound, "≤ 1.3")  # fmt: skip


def numbers(run: Run, bounds: Worker) -> None:
    """The weights of a text as JSON numbers, against orjson."""
    text = make("full", 1, 4)[0].text
    for decimals, goal in ((6, "≥ 2.5"), (4, "≥ 4")):
        run.begin(f"JSON numbers, {decimals} decimals")
        run.neighbours.wait()
        each = bounds.ask({"what": "numbers", "text": text, "decimals": decimals, "times": 2 * run.rounds + 1})
        theirs = f"{each['orjson']:.1f} ns (rounding, {each['rounding']:.1f} ns, left out)"
        run.add(f"JSON numbers, {decimals} decimals", f"{each['ours']:.1f} ns each", "orjson of the rounded array", theirs,
                each["orjson"] / each["ours"], goal)  # fmt: skip


def little_of_it(run: Run, own: Running) -> None:
    """A little attention against none: the same request, with and without it."""
    short, full = ([t.text for t in make(kind, count, 3)] for kind, count in (("short", 40), ("full", 16)))
    word = "focus on one word, all layers and heads, 256 tokens"
    for what, texts, fields, goal in (("last layer, all heads, short text", short, {}, "≤ 1.2"), (word, full, EVERYTHING, "≤ 1.5")):
        run.begin(what)
        focus = {"focus": second_word} if texts is full else {}
        bodies = [{"text": text, **fields, **{name: of(text) for name, of in focus.items()}} for text in texts]
        rounds = []
        for number in range(run.rounds + 1):
            run.neighbours.wait()
            with_it = took(own, bodies)
            without = took(own, [body | {"include": ["pooled", "embeddings"]} for body in bodies])
            rounds += [(with_it, without)] if number else []
        mine, bare = (median(column) for column in zip(*rounds, strict=True))
        run.add(what, f"{1000 * mine:.2f} ms", "embeddings alone", f"{1000 * bare:.2f} ms", mine / bare, goal)


def second_word(text: str) -> dict[str, int]:
    """The place of a text's second word."""
    first, second = text.split()[:2]
    return {"start": len(first) + 1, "end": len(first) + 1 + len(second)}
