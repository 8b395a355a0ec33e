"""TEI's dialect (text-embeddings-inference 1.9), with the client that Hugging Face ships, and on the wire."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from service import errors
from tests import tiny
from tests.server import serving

SENTENCE = "Tom is going to fish at the river bank"
IDS = [101, 3419, 2003, 2183, 2000, 3869, 2012, 1996, 2314, 2924, 102]


def vector(server, text: str) -> np.ndarray:
    return np.array(server.client.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"])


def test_hugging_faces_client(server):
    client = InferenceClient(base_url=server.url)
    got = np.array(client.feature_extraction(SENTENCE, normalize=True, truncate=True, truncation_direction="Left"))
    assert got.shape == (1, 384)
    assert got[0] == pytest.approx(vector(server, SENTENCE), abs=1e-6)
    assert client.sentence_similarity("a river", other_sentences=["a stream", "a car"])[0] > 0.5


def test_embed(server):
    one = server.client.post("/embed", json={"inputs": SENTENCE})
    assert len(one.json()) == 1
    assert one.headers["x-compute-tokens"] == "11"
    many = server.client.post("/embed", json={"inputs": [SENTENCE, "b"], "truncation_direction": "left"}).json()
    assert np.array(many[0]) == pytest.approx(vector(server, SENTENCE), abs=1e-6)
    short = server.client.post("/embed", json={"inputs": SENTENCE, "dimensions": 10}).json()[0]
    assert len(short) == 10
    assert np.linalg.norm(short) == pytest.approx(1)
    assert server.client.post("/embed", json={"inputs": [IDS]}).json()[0] == pytest.approx(vector(server, SENTENCE), abs=1e-6)


def test_vectors_that_are_not_normalized(server):
    raw = np.array(server.client.post("/embed", json={"inputs": SENTENCE, "normalize": False}).json()[0])
    tokens = np.array(server.client.post("/embed_all", json={"inputs": SENTENCE}).json()[0])
    assert tokens.shape == (11, 384)
    assert raw == pytest.approx(tokens.mean(0), abs=1e-6)
    assert raw / np.linalg.norm(raw) == pytest.approx(vector(server, SENTENCE), abs=1e-6)


def test_what_is_too_long_is_cut_unless_told_otherwise(server):
    long = "the river " * 300 + "bank"
    right = server.client.post("/embed", json={"inputs": long})
    left = server.client.post("/embed", json={"inputs": long, "truncation_direction": "Left"})
    assert right.headers["x-compute-tokens"] == left.headers["x-compute-tokens"] == "256"
    assert np.abs(np.array(right.json()) - np.array(left.json())).max() > 1e-4
    refused = server.client.post("/embed", json={"inputs": long, "truncate": False})
    assert refused.status_code == 422
    assert refused.json()["error_type"] == "Validation"
    assert "603" in refused.json()["error"]
    assert "256" in refused.json()["error"]


def test_token_ids_are_cut_at_the_end_that_is_asked_for(server):
    ids = list(range(2000, 2400))
    for direction, kept in (("Left", ids[-256:]), ("Right", ids[:256])):
        cut = server.client.post("/embed", json={"inputs": [ids], "truncation_direction": direction})
        assert cut.headers["x-compute-tokens"] == "256"
        assert cut.json()[0] == pytest.approx(server.client.post("/embed", json={"inputs": [kept]}).json()[0], abs=1e-6)


def test_a_text_that_looks_like_another_route(server):
    texts = ["source_sentence", 'the "source_sentence": a key']
    assert server.client.post("/", json={"inputs": texts}).json() == server.client.post("/embed", json={"inputs": texts}).json()


def test_similarity(server):
    body = {
        "inputs": {"source_sentence": SENTENCE, "sentences": ["He caught a fish", "The bank gave a loan"]},
        "parameters": {"truncate": True},
    }
    got = server.client.post("/similarity", json=body).json()
    expected = [vector(server, text) @ vector(server, SENTENCE) for text in body["inputs"]["sentences"]]
    assert got == pytest.approx(expected, abs=1e-6)


def test_tokenize_counts_code_points(server):
    text = "👩‍🚀 the rivèr bank"
    tokens = server.client.post("/tokenize", json={"inputs": text}).json()[0]
    assert [t["special"] for t in tokens] == [True] + [False] * (len(tokens) - 2) + [True]
    assert tokens[0] == {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert [text[t["start"] : t["stop"]] for t in tokens[-4:-1]] == ["the", "rivèr", "bank"]
    assert [t["text"] for t in tokens[-4:-1]] == ["the", "rivèr", "bank"]  # as it was sent: the vocabulary has "river"
    bare = server.client.post("/tokenize", json={"inputs": [text, "a"], "add_special_tokens": False}).json()
    assert [t["id"] for t in bare[0]] == [t["id"] for t in tokens[1:-1]]
    assert len(bare[1]) == 1
    assert len(server.client.post("/tokenize", json={"inputs": "a " * 1000}).json()[0]) == 1002


def test_prompts(tmp_path):
    """A default by the server's setting, another by name; /tokenize shows what /embed gives to the model."""
    modules = [Transformer(str(tiny.save(tmp_path / "plain"))), Pooling(tiny.WIDTH)]
    reference = SentenceTransformer(modules=modules, prompts={"query": "find: ", "document": "text: "}, device="cpu")
    folder = tmp_path / "prompted"
    reference.save(str(folder))
    with serving(tmp_path / "log", "--model", str(folder), "--default-prompt", "document") as server:
        for fields, prompt in (({}, "text: "), ({"prompt_name": "query"}, "find: ")):
            ids = reference.tokenizer(prompt + "abc")["input_ids"]
            embedded = server.client.post("/embed", json={"inputs": "abc", **fields})
            right = reference.encode("abc", prompt=prompt)
            assert embedded.json()[0] == pytest.approx(right / np.linalg.norm(right), abs=2e-6)
            assert embedded.headers["x-compute-tokens"] == str(len(ids))
            tokens = server.client.post("/tokenize", json={"inputs": "abc", **fields}).json()[0]
            assert [t["id"] for t in tokens] == ids
            placed = [t for t in tokens if t["start"] is not None]
            assert "".join(t["text"] for t in placed) == "abc"
            assert all(t["text"] == "abc"[t["start"] : t["stop"]] for t in placed)


def test_decode(server):
    assert server.client.post("/decode", json={"ids": IDS}).json() == [SENTENCE.lower()]
    kept = server.client.post("/decode", json={"ids": [IDS, [2924]], "skip_special_tokens": False}).json()
    assert kept == [f"[CLS] {SENTENCE.lower()} [SEP]", "bank"]


def test_info_and_health(server):
    info = server.client.get("/info").json()
    assert info["model_id"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert info["max_input_length"] == 256
    assert info["max_client_batch_size"] == 32
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty"),
        ("/embed", {"inputs": ["a"] * 33}, 422, "Validation"),
        ("/embed", {"inputs": 5}, 422, "Validation"),
        ("/embed", {}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 1000}, 422, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": "none"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "normalize": "false"}, 422, "Validation"),
        ("/embed", {"inputs": [[101, 99999999]]}, 422, "Validation"),
        ("/embed_all", {"inputs": ""}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
        ("/similarity", {"inputs": "a"}, 422, "Validation"),
        ("/tokenize", {"inputs": None}, 422, "Validation"),
        ("/decode", {"ids": ["a"]}, 422, "Validation"),
        ("/decode", {"ids": [99999999]}, 422, "Validation"),
    ],
)
def test_errors_are_teis(server, path, body, status, kind):
    response = server.client.post(path, json=body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error", "error_type"}
    assert response.json()["error_type"] == kind


def test_errors_that_no_body_can_help(server, tmp_path):
    assert server.client.post("/embed", content=b"{").json()["error_type"] == "Validation"
    with serving(tmp_path / "log", "--max-body-bytes", "100", "--max-queue-tokens", "50") as small:
        response = small.client.post("/embed", json={"inputs": "a" * 200})
        assert response.status_code == 413
        assert set(response.json()) == {"error", "error_type"}
        never = small.client.post("/embed", json={"inputs": ["a"] * 20})
        assert never.status_code == 422
        assert "60 tokens" in never.json()["error"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.nonfinite("m"), 424, "Backend"),
        (errors.internal("id"), 424, "Backend"),
        (errors.overloaded(5, 4, 1.0), 429, "Overloaded"),
        (errors.draining(), 503, "Unhealthy"),
        (errors.not_ready("m"), 503, "Unhealthy"),
        (errors.body_too_large(9, 8), 413, "Validation"),
        (errors.text_too_long("long"), 422, "Validation"),
    ],
)
def test_codes_that_the_service_is_at_fault_for(error, status, kind):
    assert errors.render(error, "tei") == (status, {"error": error.message, "error_type": kind})


def test_what_is_wrong_within_similarity_is_named(server):
    missing = server.client.post("/similarity", json={"inputs": {"source_sentence": "a"}}).json()["error"]
    assert missing == "the field inputs.sentences is missing"
    assert server.client.post("/similarity", json={"inputs": [1]}).json()["error"] == "inputs must be a JSON object, not list"


def test_an_overloaded_server_says_when_to_come_back(tmp_path):
    with serving(tmp_path / "log", "--max-queue-tokens", "1500", "--max-batch-tokens", "600") as server, ThreadPoolExecutor(12) as pool:
        body = {"inputs": ["river bank " * 60] * 5}
        answers = list(pool.map(lambda _: server.client.post("/embed", json=body), range(36)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["retry-after"]) >= 1 and answer.json()["error_type"] == "Overloaded" for answer in refused)
