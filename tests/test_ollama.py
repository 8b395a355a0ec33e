"""Ollama's dialect, with its own package."""

import numpy as np
import ollama
import pytest

from models.checkpoint import DEFAULT_MODEL
from tests.server import serving


@pytest.fixture(scope="module")
def client(server) -> ollama.Client:
    return ollama.Client(host=server.url)


@pytest.mark.parametrize("model", [DEFAULT_MODEL, DEFAULT_MODEL + ":latest"])
def test_embed(client, model):
    answer = client.embed(model=model, input=["The river bank", "b"])
    assert answer.model == model
    assert np.array(answer.embeddings).shape == (2, 384)
    assert np.linalg.norm(answer.embeddings[0]) == pytest.approx(1, abs=1e-6)
    assert answer.prompt_eval_count == 8
    assert answer.total_duration > 0


def test_dimensions_and_truncation(client):
    short = client.embed(model=DEFAULT_MODEL, input="river " * 400, dimensions=32, keep_alive="5m", options={"num_ctx": 512})
    assert len(short.embeddings[0]) == 32
    assert short.prompt_eval_count == 256
    with pytest.raises(ollama.ResponseError, match="402"):
        client.embed(model=DEFAULT_MODEL, input="river " * 400, truncate=False)


def test_values_that_ollama_takes_for_its_defaults(server):
    body = {"model": DEFAULT_MODEL, "input": "river " * 400, "truncate": None, "dimensions": 0}
    answer = server.client.post("/api/embed", json=body).json()
    assert len(answer["embeddings"][0]) == 384
    assert answer["prompt_eval_count"] == 256


@pytest.mark.parametrize("alias", ["all-minilm", "all-minilm:latest"])
def test_a_tag_or_none_is_the_same_model(tmp_path, alias):
    with serving(tmp_path / "log", "--alias", f"{alias}={DEFAULT_MODEL}") as server:
        for name in ("all-minilm", "all-minilm:latest"):
            assert ollama.Client(host=server.url).embed(model=name, input="a").model == name
        with pytest.raises(ollama.ResponseError, match="all-minilm:33m"):
            ollama.Client(host=server.url).embed(model="all-minilm:33m", input="a")


def test_what_is_not_there(client, server):
    with pytest.raises(ollama.ResponseError) as caught:
        client.embed(model="llama3", input="a")
    assert caught.value.status_code == 404
    assert DEFAULT_MODEL in str(caught.value)
    assert server.client.post("/api/embed", json={"model": DEFAULT_MODEL, "input": ""}).json() == {"error": "input: the text is empty"}
    assert [m.model for m in client.list().models] == [DEFAULT_MODEL]
    assert "version" in server.client.get("/api/version").json()
