"""POST /attend on the default model: the article's sentence, numbers published elsewhere, and texts that are hard."""

import base64

import numpy as np
import pytest

SENTENCE = "Tom is going to fish at the river bank"
RIVER, BANK = 8, 9


def weights(result: dict) -> np.ndarray:
    return np.array(result["attention"]["weights"])


def test_the_articles_sentence(server):
    result = server.attend(SENTENCE, layers="all", decimals=9)["results"][0]
    tokens = result["tokens"]
    assert [t["id"] for t in tokens] == [101, 3419, 2003, 2183, 2000, 3869, 2012, 1996, 2314, 2924, 102]
    assert (tokens[RIVER]["start"], tokens[RIVER]["end"]) == (28, 33)
    assert (tokens[BANK]["start"], tokens[BANK]["end"]) == (34, 38)
    assert tokens[BANK] == {"id": 2924, "text": "bank", "start": 34, "end": 38, "word": 8, "segment": 0, "special": False}
    assert tokens[0] == {"id": 101, "text": "[CLS]", "start": None, "end": None, "word": None, "segment": None, "special": True}
    assert [w["text"] for w in result["words"]] == SENTENCE.split()
    a = weights(result)
    assert a.shape == (6, 12, 11, 11)
    assert np.allclose(a.sum(-1), 1, atol=1e-6)
    to_bank = dict(zip([t["text"] for t in tokens], a.mean((0, 1))[BANK], strict=True))
    right = {"[CLS]": 0.6064, "river": 0.0990, "[SEP]": 0.0493, "bank": 0.0454, "fish": 0.0440, "tom": 0.0387}
    for piece, weight in right.items():
        assert to_bank[piece] == pytest.approx(weight, abs=1e-4)
    assert a[0, 2, BANK, RIVER] == pytest.approx(0.9997, abs=1e-4)
    assert a[2, 11, BANK, RIVER] == pytest.approx(0.7576, abs=1e-4)
    assert a[5, 6, BANK, 5] == pytest.approx(0.3928, abs=1e-4)
    assert result["embeddings"][BANK][:4] == pytest.approx([-0.09303, 0.38073, -0.52093, -0.99260], abs=1e-4)


def test_bank_attends_to_river_bank_and_fish(server):
    asked = {"focus": "bank", "layers": "all", "combine_heads": "mean", "special_tokens": "drop", "include": ["attention"]}
    result = server.attend(SENTENCE, **asked)["results"][0]
    row = weights(result)[:, 0, 0].mean(0)  # over the layers
    keys = [result["tokens"][k]["text"] for k in result["attention"]["keys"]]
    assert [keys[i] for i in np.argsort(-row)[:3]] == ["river", "bank", "fish"]
    assert result["attention"]["queries"] == [BANK]
    assert np.allclose(weights(result).sum(-1), 1, atol=1e-5)


def test_published_vectors(server):
    result = server.attend("What is Deep Learning?", decimals=9)["results"][0]
    vectors = np.array(result["embeddings"])
    assert vectors.shape == (7, 384)
    assert vectors[0, :4] == pytest.approx([-0.0235, -0.5267, 0.1785, -0.1466], abs=1e-3)
    assert vectors.mean(0)[:5] == pytest.approx([-0.5902, -0.2523, 0.1497, 0.0548, -0.1180], abs=1e-3)
    assert np.array(result["pooled"]) == pytest.approx(vectors.mean(0) / np.linalg.norm(vectors.mean(0)), abs=1e-6)


def test_defaults(server):
    answer = server.attend("the river bank")
    assert answer["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert answer["usage"] == {"texts": 1, "tokens": 5}
    result = answer["results"][0]
    assert list(result) == ["tokens", "words", "truncated", "pooled", "embeddings", "attention"]
    assert result["attention"]["axes"] == ["layer", "head", "query", "key"]
    assert result["attention"]["layers"] == [5]
    assert result["attention"]["heads"] == list(range(12))
    assert result["attention"]["queries"] == result["attention"]["keys"] == list(range(5))
    assert weights(result).shape == (1, 12, 5, 5)


def test_layers_heads_and_their_combination(server):
    full = weights(server.attend(SENTENCE, layers="all", decimals=9)["results"][0])
    result = server.attend(SENTENCE, layers=[-1, 0], heads=[3, 1], decimals=9)["results"][0]
    assert result["attention"]["layers"] == [5, 0]
    assert result["attention"]["heads"] == [3, 1]
    assert weights(result) == pytest.approx(full[[5, 0]][:, [3, 1]], abs=1e-7)
    for how, combine in (("mean", np.mean), ("max", np.max)):
        result = server.attend(SENTENCE, layers=[2], combine_heads=how, decimals=9)["results"][0]
        assert result["attention"]["heads"] == [how]
        assert weights(result)[0, 0] == pytest.approx(combine(full[2], axis=0), abs=1e-7)


def test_hidden_states(server):
    result = server.attend(SENTENCE, hidden_layers=[0, 6, -2], decimals=9)["results"][0]
    states = result["hidden_states"]
    assert states["axes"] == ["layer", "token", "dim"]
    assert states["layers"] == [0, 6, 5]
    assert np.array(states["values"]).shape == (3, 11, 384)
    assert np.array(states["values"][1]) == pytest.approx(np.array(result["embeddings"]), abs=1e-6)
    assert len(server.attend(SENTENCE, hidden_layers="all", include=[])["results"][0]["hidden_states"]["layers"]) == 7


def test_include_leaves_out(server):
    assert list(server.attend("a", include=[])["results"][0]) == ["tokens", "words", "truncated"]
    assert list(server.attend("a", include=["pooled"])["results"][0]) == ["tokens", "words", "truncated", "pooled"]


def test_many_texts_in_order_and_alone_or_in_a_batch(server):
    texts = ["one", SENTENCE, "a b c d " * 50, "x", "the end"]
    together = server.attend(texts, decimals=9, include=["pooled", "embeddings"])["results"]
    for text, result in zip(texts, together, strict=True):
        alone = server.attend(text, decimals=9, include=["pooled", "embeddings"])["results"][0]
        assert [t["id"] for t in alone["tokens"]] == [t["id"] for t in result["tokens"]]
        assert np.array(result["pooled"]) == pytest.approx(np.array(alone["pooled"]), abs=1e-5)
        assert np.array(result["embeddings"]) == pytest.approx(np.array(alone["embeddings"]), abs=1e-5)


def test_pairs(server):
    result = server.attend([["The bank is closed.", "Tom went fishing"]])["results"][0]
    inner = [t for t in result["tokens"] if not t["special"]]
    assert [t["segment"] for t in inner] == [0] * 5 + [1] * 3
    texts = ["The bank is closed.", "Tom went fishing"]
    assert [texts[t["segment"]][t["start"] : t["end"]].lower() for t in inner] == [t["text"] for t in inner]
    assert [w["text"] for w in result["words"]] == ["The", "bank", "is", "closed.", "Tom", "went", "fishing"]
    assert [w["segment"] for w in result["words"]] == [0, 0, 0, 0, 1, 1, 1]


def test_too_long(server):
    text = "river " * 400
    response = server.client.post("/attend", json={"text": ["short", text]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "text_too_long"
    assert error["param"] == "text"
    for number in ("402", "256", "item 1"):
        assert number in error["message"]
    result = server.attend(text, truncate=True, include=["pooled"])["results"][0]
    assert result["truncated"] is True
    assert len(result["tokens"]) == 256
    assert result["tokens"][-1]["text"] == "[SEP]"


def test_base64_has_the_same_bits(server):
    exact = server.attend(SENTENCE, decimals=None)["results"][0]
    packed = server.attend(SENTENCE, encoding_format="base64")["results"][0]
    for name, value in (("pooled", packed["pooled"]), ("embeddings", packed["embeddings"])):
        array = np.frombuffer(base64.b64decode(value["data"]), "<f4").reshape(value["shape"])
        assert value["dtype"] == "float32"
        assert np.array_equal(array, np.array(exact[name], dtype=np.float32))


@pytest.mark.parametrize(
    "text",
    [
        "👩‍👩‍👧‍👦 family and 🏳️‍🌈 flag",
        "e\u0301tude a\u0308rger",
        "银行在河边。东京タワー",
        "שלום עולם مرحبا بالعالم",
        "nul\x00 in the middle",
        "x" * 10_000,
        "  spaces   all\taround\n",
        "don't re-read it's well-known...",
        "ﬁne ＷＩＤＥ ½ İstanbul ǅ",
        "\u200b\u200d\ufeff",
        " ",
        "naïve café — “quoted”",
    ],
)
def test_hard_texts(server, text):
    response = server.client.post("/attend", json={"text": text, "truncate": True, "include": ["pooled"]})
    assert response.status_code == 200, response.text
    result = response.json()["results"][0]
    reached = 0
    for token in result["tokens"]:
        if token["special"]:
            assert token["start"] is token["end"] is token["word"] is None
            continue
        assert 0 <= token["start"] <= token["end"] <= len(text)
        assert token["start"] >= reached or token["end"] >= reached
        reached = token["start"]
        word = result["words"][token["word"]]
        assert word["start"] <= token["start"]
        assert token["end"] <= word["end"] or token["start"] == token["end"]
        assert word["text"] == text[word["start"] : word["end"]]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": ""}, "text"), ({"text": []}, "text"), ({"text": [""]}, "text"), ({"text": None}, "text"), ({"text": 5}, "text"),
        ({"text": ["a", 5]}, "text"), ({"text": ["a", ["b"]]}, "text"), ({"text": ["a", ["b", "c", "d"]]}, "text"), ({}, "text"),
        ({"text": "a", "layers": [6]}, "layers"), ({"text": "a", "layers": [-7]}, "layers"), ({"text": "a", "layers": "first"}, "layers"),
        ({"text": "a", "layers": []}, "layers"), ({"text": "a", "layers": [True]}, "layers"), ({"text": "a", "layers": [1, 1]}, "layers"),
        ({"text": "a", "heads": [12]}, "heads"), ({"text": "a", "heads": [-1]}, "heads"), ({"text": "a", "heads": 3}, "heads"),
        ({"text": "a", "hidden_layers": [7]}, "hidden_layers"), ({"text": "a", "hidden_layers": "last"}, "hidden_layers"),
        ({"text": "a", "combine_heads": "sum"}, "combine_heads"), ({"text": "a", "include": ["tokens"]}, "include"),
        ({"text": "a", "focus": "b"}, "focus"), ({"text": "a", "focus": [5]}, "focus"), ({"text": "a", "focus": {"start": 0}}, "focus"),
        ({"text": "a", "focus": {"start": 0, "end": 2}}, "focus"), ({"text": "a", "focus": {"text": "a", "occurrence": 1}}, "focus"),
        ({"text": "a", "spans": []}, "spans"), ({"text": "a", "spans": ["b"]}, "spans"), ({"text": "a", "unit": "letter"}, "unit"),
        ({"text": "a", "decimals": 0}, "decimals"), ({"text": "a", "decimals": 10}, "decimals"),
        ({"text": "a", "truncate": "yes"}, "truncate"),
        ({"text": "a", "encoding_format": "hex"}, "encoding_format"), ({"text": "a", "special_tokens": "hide"}, "special_tokens"),
        ({"text": "a", "colour": "red"}, "colour"), ({"text": "a", "stages": ["query"]}, "stages"), ({"text": "a", "edits": []}, "edits"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(server, body, field):
    response = server.client.post("/attend", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "invalid_request"
    assert error["param"] == field
    assert field in error["message"] or field[:-1] in error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"text": "\\ud800"}', b'{"text": "a", "text": NaN}'])
def test_bodies_that_are_no_request(server, raw):
    response = server.client.post("/attend", content=raw)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_model_that_is_not_served(server):
    response = server.client.post("/attend", json={"text": "a", "model": "all-minilm"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "sentence-transformers/all-MiniLM-L6-v2" in response.json()["error"]["message"]


def test_headers(server):
    response = server.client.post("/attend", json={"text": SENTENCE}, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-compute-tokens"] == "11"
    for name in ("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"):
        assert float(response.headers[name]) >= 0
    assert len(server.client.get("/livez").headers["x-request-id"]) == 32
