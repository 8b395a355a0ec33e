"""The benchmark's own parts: texts that count what they say, a client that reads what servers send, peers that may be missing,
a table that adds up.
"""

import asyncio
import json
import subprocess
import sys

import pytest

from bench import servers
from bench.attention import flat, same_weights, second_word
from bench.client import Answers, BadAnswer, Load, Outcome, run
from bench.embeddings import ATTEND, BARE, INFINITY, LOADS, LONE, MIX, ONNX, report, rounds, same_vectors
from bench.neighbours import TICK, Neighbours, own_ticks
from bench.servers import Running, Spec, Unavailable
from bench.table import Figures, Line, Run, percentile, table
from bench.texts import make
from models.checkpoint import DEFAULT_MODEL, load
from models.passages import Reader


class Fake:
    """A contestant that takes a fixed time for each request, and gives a fixed vector; without a time it fails."""

    def __init__(self, seconds: float | None, vector: tuple[float, ...] = (0.6, 0.8)) -> None:
        self.seconds, self.vector = seconds, list(vector)

    def embed(self, texts: list[str], size: int, clients: int) -> Outcome:
        if self.seconds is None:
            raise Unavailable("it fell over")
        count = len(texts) // size
        return Outcome(self.seconds * count, [self.seconds] * count, 0)

    def vectors(self, texts: list[str]) -> list[list[float]]:
        return [self.vector] * len(texts)


def test_texts_have_as_many_tokens_as_they_say():
    reader = Reader(load(DEFAULT_MODEL).tokenizer, None)
    for kind in ("short", "sentence", "paragraph", "long", "full", "mix"):
        texts = make(kind, 60, seed=3)
        assert len({t.text for t in texts}) == 60
        assert [len(p) for p in reader.read([(t.text,) for t in texts])] == [t.tokens for t in texts], kind
        assert make(kind, 60, seed=3) == texts


def test_the_mix_is_what_it_is_called():
    lengths = [t.tokens for t in make("mix", 200)]
    assert sum(n >= 200 for n in lengths) == 20
    assert all(6 <= t.tokens <= 8 for t in make("short", 50))
    assert all(t.tokens == 256 for t in make("full", 5))


def test_loads_keep_every_client_busy():
    for one in LOADS:
        texts = one.texts(1, quick=True)
        assert len(texts) % one.size == 0
        assert len(texts) // one.size >= one.clients
        assert texts != one.texts(2, quick=True)


def test_the_client_times_every_request(server):
    bodies = [json.dumps({"text": t.text, "include": ["pooled"]}) for t in make("short", 12)]
    outcome = asyncio.run(run(Load("127.0.0.1", server.port, "/attend", bodies, clients=3)))
    assert len(outcome.latencies) == 12
    assert 0 < max(outcome.latencies) <= outcome.seconds
    assert outcome.received > 12 * 384
    chunked = asyncio.run(run(Load("127.0.0.1", server.port, "/attend", [json.dumps({"text": "a b c", "layers": "all"})])))
    plain = server.client.post("/attend", json={"text": "a b c", "layers": "all"}, headers={"accept-encoding": "identity"})
    assert chunked.received == len(plain.content)


def test_the_client_does_not_time_errors(server):
    with pytest.raises(BadAnswer, match="400"):
        asyncio.run(run(Load("127.0.0.1", server.port, "/attend", ["{}"])))
    with pytest.raises(Unavailable, match=r"attend: BadAnswer: http/1\.1 400"):
        Running(servers.attend(), server.process, server.port).send(["{}"], 1, "/attend")


def test_the_service_its_forward_and_the_obvious_service_compute_the_same(server):
    own = Running(servers.attend(), server.process, server.port)
    with servers.bounds() as bounds:
        field = {ATTEND: own, BARE: bounds}
        same_vectors(field, {})
        assert set(field) == {ATTEND, BARE}
        assert len(own.embed([t.text for t in make("short", 12)], 3, 2).latencies) == 4
        assert len(bounds.embed([t.text for t in make("short", 12)], 1, 1).latencies) == 12
        code = bounds.ask({"what": "recording", "texts": [t.text for t in make("mix", 10)], "times": 1})
        assert code["same"]
        assert set(bounds.ask({"what": "numbers", "text": "a b", "decimals": 4, "times": 1})) == {"ours", "orjson", "rounding"}
    with servers.running(servers.obvious()) as obvious:
        same_weights(own, obvious)


def test_who_computes_something_else_is_left_out():
    field, missing = {ATTEND: Fake(1), BARE: Fake(1), INFINITY: Fake(1, (0.8, 0.6))}, {}
    same_vectors(field, missing)
    assert set(field) == {ATTEND, BARE}
    assert missing == {INFINITY: "gives other vectors, cosine 0.96000"}
    with pytest.raises(Unavailable, match="attend gives other vectors"):
        same_vectors({ATTEND: Fake(1, (1, 0)), BARE: Fake(1)}, {})


def test_who_cannot_be_measured_is_a_line_that_says_so():
    one, missing = Run(2, True, 0), {ONNX: "no network"}
    seen = rounds(one, MIX, {ATTEND: Fake(0.01), BARE: Fake(0.009), INFINITY: Fake(None)}, missing)
    assert {name: len(figures.rounds) for name, figures in seen.items()} == {ATTEND: 2, BARE: 2}
    report(one, MIX, seen, missing)
    found = {line.against: (line.theirs, line.met) for line in one.lines}
    assert found[INFINITY] == ("not measured: it fell over", "not measured")
    assert found[ONNX] == ("not measured: no network", "not measured")
    assert found[BARE][1] == "yes"
    assert [line.ratio for line in one.lines if line.against == BARE] == [pytest.approx(0.9)]
    with pytest.raises(Unavailable):
        rounds(one, MIX, {ATTEND: Fake(None), BARE: Fake(1)}, {})


def test_one_at_a_time_is_compared_by_its_p50():
    one = Run(1, True, 0)
    seen = rounds(one, LONE, {ATTEND: Fake(0.010), BARE: Fake(0.009), INFINITY: Fake(0.020)}, {ONNX: "-"})
    report(one, LONE, seen, {ONNX: "-"})
    ratios = {line.against: line.ratio for line in one.lines}
    assert ratios[f"{INFINITY}, p50"] == pytest.approx(0.5)
    assert ratios[f"{BARE} + 1.5 ms"] == pytest.approx(10 / 10.5)


@pytest.mark.parametrize("start", [servers.running, lambda spec: servers.working(spec.name, *spec.command)], ids=["server", "worker"])
def test_a_process_that_ends_says_why(start):
    spec = Spec("broken", (sys.executable, "-c", "raise SystemExit('no such model')"), "/readyz", "/")
    with pytest.raises(Unavailable, match=r"broken .*no such model"), start(spec):
        pass


def test_what_the_benchmark_does_is_not_what_its_neighbours_do():
    before = own_ticks()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert own_ticks() - before >= 0.25 * TICK
    assert Neighbours(patience=0).cores() >= 0


def test_figures_are_medians_of_rounds():
    figures = Figures([(100, Outcome(1.0, [0.1, 0.2, 0.3], 0)), (100, Outcome(2.0, [0.4, 0.5, 0.6], 0)), (100, Outcome(4.0, [0.7], 0))])
    assert figures.speed == 50
    assert figures.p50 == pytest.approx(500)
    assert figures.p99 == pytest.approx(598)
    assert percentile(list(map(float, range(101))), 99) == pytest.approx(99)
    assert percentile([3.0], 99) == 3.0


def test_the_table_says_what_was_met():
    lines = [Line("a", "1", "b", "2", 2.0, goal) for goal in ("≥ 1.5", "≤ 1.5", "> 2", "-")] + [Line("a", "1", "b", "-", None, "> 1")]
    assert [line.met for line in lines] == ["yes", "no", "no", "-", "not measured"]
    rows = table(lines).splitlines()
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == 7


def test_words_and_numbers_are_found():
    text = make("full", 1, 4)[0].text
    place = second_word(text)
    assert text[place["start"] : place["end"]] == text.split()[1]
    assert flat([[1.0, 2.0], [[3.0]]]) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_answers_are_read_however_they_are_cut(step, size):
    body = b"x" * size
    pieces = [body[: size // 3], body[size // 3 :]]
    chunked = b"".join(f"{len(piece):x};note\r\n".encode() + piece + b"\r\n" for piece in pieces if piece) + b"0\r\n\r\n"
    heads = (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def read() -> list[int]:
        answers, sizes = Answers(), []
        for wire in (heads[0] + body, heads[1] + chunked, heads[0] + body):
            for start in range(0, len(wire), step):
                piece = wire[start : start + step]
                answers.get_buffer(-1)[: len(piece)] = piece
                answers.buffer_updated(len(piece))
            sizes.append(await answers.next())
        return sizes

    assert asyncio.run(read()) == [size] * 3


def test_an_answer_that_ends_too_early_is_an_error():
    async def read() -> None:
        answers = Answers()
        answers.connection_lost(None)
        await answers.next()

    with pytest.raises(ConnectionResetError):
        asyncio.run(read())
