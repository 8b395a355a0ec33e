"""OpenAI's dialect: with its own SDK, and on the wire."""

import asyncio
import base64

import numpy as np
import openai
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from models.checkpoint import DEFAULT_MODEL, locate
from tests import tiny
from tests.server import serving
from tests.texts import VARIED

SENTENCE = "Tom is going to fish at the river bank"
IDS = [101, 3419, 2003, 2183, 2000, 3869, 2012, 1996, 2314, 2924, 102]


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_sdk_by_default(client):
    """It asks for base64 and decodes it by itself."""
    answer = client.embeddings.create(model=DEFAULT_MODEL, input=SENTENCE)
    vector = np.array(answer.data[0].embedding)
    assert vector.shape == (384,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 11
    assert answer.model == DEFAULT_MODEL
    assert [item.index for item in client.embeddings.create(model=DEFAULT_MODEL, input=["a", "b"]).data] == [0, 1]


def test_async_sdk(server):
    async def ask() -> list[float]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(*(client.embeddings.create(model=DEFAULT_MODEL, input=SENTENCE) for _ in range(4)))
            return [answer.data[0].embedding for answer in answers]

    first, *others = asyncio.run(ask())
    assert all(other == pytest.approx(first, abs=1e-6) for other in others)  # in a batch with others, or alone


def test_models(client):
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
    assert client.models.retrieve(DEFAULT_MODEL).owned_by == "sentence-transformers"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_strings_ids_floats_and_base64_give_the_same_bits(server):
    def ask(value: object, form: str) -> list[np.ndarray]:
        data = server.client.post("/v1/embeddings", json={"input": value, "encoding_format": form}).json()["data"]
        if form == "float":
            return [np.array(item["embedding"], dtype=np.float32) for item in data]
        return [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data]

    first = ask(SENTENCE, "float")[0]
    for value in (SENTENCE, [SENTENCE], IDS, [IDS]):
        for form in ("float", "base64"):
            assert np.array_equal(ask(value, form)[0], first), (value, form)
    assert np.array_equal(np.array(server.attend(SENTENCE, decimals=None)["results"][0]["pooled"], dtype=np.float32), first)
    assert np.array_equal(np.array(server.client.post("/embed", json={"inputs": SENTENCE}).json()[0], dtype=np.float32), first)
    ollama = server.client.post("/api/embed", json={"model": DEFAULT_MODEL, "input": SENTENCE}).json()["embeddings"][0]
    assert np.array_equal(np.array(ollama, dtype=np.float32), first)


def test_texts_and_token_ids_together(server):
    data = server.client.post("/v1/embeddings", json={"input": ["a stream", IDS, SENTENCE]}).json()["data"]
    alone = [server.client.post("/v1/embeddings", json={"input": text}).json()["data"][0] for text in ("a stream", SENTENCE, SENTENCE)]
    for together, single in zip(data, alone, strict=True):
        assert together["embedding"] == pytest.approx(single["embedding"], abs=1e-6)


def test_parity_with_sentence_transformers(server):
    reference = SentenceTransformer(str(locate(DEFAULT_MODEL)[2]), device="cpu").encode(VARIED)
    body = {"input": VARIED, "encoding_format": "float", "truncate": True}
    got = np.array([item["embedding"] for item in server.client.post("/v1/embeddings", json=body).json()["data"]], dtype=np.float32)
    assert np.abs(got - reference).max() < 2e-6
    assert (got * reference).sum(1).min() >= 0.999999


def test_dimensions_are_cut_and_scaled(client):
    full = np.array(client.embeddings.create(model=DEFAULT_MODEL, input=SENTENCE).data[0].embedding)
    short = np.array(client.embeddings.create(model=DEFAULT_MODEL, input=SENTENCE, dimensions=64).data[0].embedding)
    assert short == pytest.approx(full[:64] / np.linalg.norm(full[:64]), abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="384"):
        client.embeddings.create(model=DEFAULT_MODEL, input=SENTENCE, dimensions=385)


def test_fields_that_openai_does_not_have(server):
    body = {"input": "a", "user": 5, "extra": 1, "metadata": {}, "encoding_format": None, "dimensions": None, "truncate": None}
    assert server.client.post("/v1/embeddings", json=body).status_code == 200
    assert server.client.post("/embeddings", json=body).json() == server.client.post("/v1/embeddings", json=body).json()


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        ({"input": ""}, 400, "input", "empty"),
        ({"input": []}, 400, "input", "empty"),
        ({"input": ["a", ""]}, 400, "input", "item 1"),
        ({"input": [[]]}, 400, "input", "item 0"),
        ({"input": None}, 400, "input", "null"),
        ({}, 400, "input", "missing"),
        ({"input": [1, "a"]}, 400, "input", "item 0"),
        ({"input": [30522]}, 400, "input", "30522"),
        ({"input": [-1]}, 400, "input", "-1"),
        ({"input": [[101, 102], [101, 30522]]}, 400, "input", "item 1: the token id 30522 is not in the vocabulary, which has ids 0 to"),
        ({"input": ["a", [101] * 257]}, 400, "input", "item 1"),
        ({"input": "a " * 300}, 400, "input", "302"),
        ({"input": [5] * 257}, 400, "input", "257"),
        ({"input": ["a"] * 2049}, 400, "input", "2048"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "1"),
        ({"input": "a", "dimensions": 385}, 400, "dimensions", "384"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format", "base64"),
        ({"input": "a", "model": "text-embedding-3-small"}, 404, "model", DEFAULT_MODEL),
        ({"input": "a", "prompt_name": "query"}, 400, "prompt_name", "none"),
    ],
)
def test_errors_are_openais(server, body, status, param, said):
    response = server.client.post("/v1/embeddings", json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert said in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_too_many_tokens_in_sum(tmp_path):
    with serving(tmp_path / "log", "--max-request-tokens", "20", "--alias", "text-embedding-3-small=" + DEFAULT_MODEL) as server:
        response = server.client.post("/v1/embeddings", json={"input": ["a b c d e f g h"] * 3})
        assert response.status_code == 400
        assert "30 tokens" in response.json()["error"]["message"]
        assert "20" in response.json()["error"]["message"]
        answer = server.client.post("/v1/embeddings", json={"input": "a", "model": "text-embedding-3-small"}).json()
        assert answer["model"] == "text-embedding-3-small"
        assert [m["id"] for m in server.client.get("/v1/models").json()["data"]] == [DEFAULT_MODEL, "text-embedding-3-small"]


def test_prompts(tmp_path):
    modules = [Transformer(str(tiny.save(tmp_path / "plain"))), Pooling(tiny.WIDTH)]
    reference = SentenceTransformer(modules=modules, prompts={"query": "find: ", "document": "text: "}, device="cpu")
    folder = tmp_path / "prompted"
    reference.save(str(folder))
    with serving(tmp_path / "log", "--model", str(folder), "--default-prompt", "document") as server:

        def ask(**fields: object) -> tuple[np.ndarray, int]:
            response = server.client.post("/v1/embeddings", json={"input": "abc", **fields})
            assert response.status_code == 200, response.text
            answer = response.json()
            return np.array(answer["data"][0]["embedding"]), answer["usage"]["prompt_tokens"]

        for fields, encoded in (({"prompt_name": "query"}, "find: "), ({"prompt": "ask: "}, "ask: "), ({}, "text: "), ({"prompt": ""}, "")):
            vector, tokens = ask(**fields)
            right = reference.encode("abc", prompt=encoded)
            assert vector == pytest.approx(right / np.linalg.norm(right), abs=2e-6)
            assert tokens == len(reference.tokenizer(encoded + "abc")["input_ids"])
        unknown = server.client.post("/v1/embeddings", json={"input": "a", "prompt_name": "title"})
        assert "query, document" in unknown.json()["error"]["message"]


def test_an_overloaded_server_is_asked_again_by_the_sdk(tmp_path):
    """429 carries Retry-After; the SDK waits and gets its answers in the end."""
    with serving(tmp_path / "log", "--max-queue-tokens", "1500", "--max-batch-tokens", "600") as server:

        async def ask() -> list[int]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=8) as client:
                texts = [["river bank " * 60] * 5 for _ in range(12)]
                return [len(a.data) for a in await asyncio.gather(*(client.embeddings.create(model=DEFAULT_MODEL, input=t) for t in texts))]

        assert asyncio.run(ask()) == [5] * 12
        assert server.metric("attend_rejected_total", reason="overloaded") > 0
