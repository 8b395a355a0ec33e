"""The benchmark's own parts: texts that count what they say, a client that reads what servers send, a table that adds up."""

import asyncio
import json

import pytest

from bench.__main__ import LOADS, Line, table
from bench.client import BadAnswer, Load, run
from bench.texts import make
from models.checkpoint import DEFAULT_MODEL, load
from models.passages import Reader


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


def test_loads_have_the_texts_they_name():
    for load_ in LOADS:
        texts = load_.texts(1, quick=True)
        bodies = [json.loads(body)["input"] for body in load_.bodies(texts)]
        assert [text for body in bodies for text in body] == [t.text for t in texts]
        assert {len(body) for body in bodies} == {load_.size}
        assert len(bodies) >= load_.clients


def test_the_table_says_what_was_met():
    lines = [Line("a", "1", "b", "2", 2.0, "≥ 1.5"), Line("a", "1", "b", "2", 2.0, "≤ 1.5"), Line("a", "1", "b", "-", None, "> 1")]
    assert [line.met for line in lines] == ["yes", "no", "not measured"]
    rows = table(lines).splitlines()
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == 5
