"""TEI's dialect (text-embeddings-inference 1.9), with the client that Hugging Face ships, and on the wire."""

import numpy as np
import pytest
from huggingface_hub import InferenceClient

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
    bare = server.client.post("/tokenize", json={"inputs": [text, "a"], "add_special_tokens": False}).json()
    assert [t["id"] for t in bare[0]] == [t["id"] for t in tokens[1:-1]]
    assert len(bare[1]) == 1
    assert len(server.client.post("/tokenize", json={"inputs": "a " * 1000}).json()[0]) == 1002


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
        assert small.client.post("/embed", json={"inputs": ["a b c d e f g"] * 8}).status_code in (413, 422, 429)
