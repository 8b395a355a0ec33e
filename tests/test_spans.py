"""Spans: vectors of places in their context, all of them from the one forward."""

import numpy as np
import pytest

SENTENCE = "Tom is going to fish at the river bank"
# The city is named once; then it is "it". What a sentence alone cannot know, its span in the paragraph does.
PARAGRAPHS = {
    "Berlin": [
        "Berlin is the capital and largest city of Germany, both by area and by population.",
        "Its more than three million inhabitants make it the most populous city of the European Union.",
        "It is also one of the states of the country, and is surrounded by Brandenburg.",
    ],
    "Lisbon": [
        "Lisbon is the capital of Portugal and lies where the river Tagus meets the sea.",
        "It was almost wholly destroyed by an earthquake and a flood in the eighteenth century.",
        "Today it lives from trade, from its port and from visitors.",
    ],
    "Nairobi": [
        "Nairobi is the capital of Kenya and was founded as a railway depot.",
        "It has a national park within its borders, where lions live in sight of the towers.",
        "Many companies have their African offices in it.",
    ],
}

ALL = [sentence for sentences in PARAGRAPHS.values() for sentence in sentences]


def spans(server, text, wanted, **fields) -> list[dict]:
    return server.attend(text, spans=wanted, include=["pooled"], decimals=9, **fields)["results"][0]["spans"]


def vectors(found: list[dict]) -> np.ndarray:
    return np.array([span["vector"] for span in found])


@pytest.mark.parametrize("text", [SENTENCE, "bank", "银行在河边", "  two  words ", "👩‍👩‍👧‍👦", " ".join(["river"] * 250)])
def test_a_span_of_the_whole_text_is_pooled(server, text):
    result = server.attend(text, spans=[{"start": 0, "end": len(text)}, text], include=["pooled"], decimals=9)["results"][0]
    assert vectors(result["spans"])[0] == pytest.approx(np.array(result["pooled"]), abs=1e-6)
    assert vectors(result["spans"])[1] == pytest.approx(np.array(result["pooled"]), abs=1e-6)
    assert result["spans"][0]["tokens"] == [0, len(result["tokens"]) - 1]


def test_a_span_is_the_mean_of_its_tokens(server):
    result = server.attend(SENTENCE, spans=["river bank", "bank", [8, 9], {"start": 28, "end": 38}], decimals=9)["results"][0]
    tokens = np.array(result["embeddings"])
    mean = tokens[8:10].mean(0)
    for span in (result["spans"][0], *result["spans"][2:]):
        assert span["tokens"] == [8, 9]
        assert (span["start"], span["end"]) == (28, 38)
        assert np.array(span["vector"]) == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)
    assert np.array(result["spans"][1]["vector"]) == pytest.approx(tokens[9] / np.linalg.norm(tokens[9]), abs=1e-6)


def test_several_overlapping_in_the_order_asked_beside_everything_else(server):
    wanted = ["bank", "Tom", "river bank", "the river", {"text": "is", "occurrence": 0}]
    found = spans(server, SENTENCE, wanted)
    assert [span["tokens"] for span in found] == [[9, 9], [1, 1], [8, 9], [7, 8], [2, 2]]
    for one, asked in zip(found, wanted, strict=True):
        assert one == spans(server, SENTENCE, [asked])[0]
    assert spans(server, SENTENCE, wanted, focus="Tom", unit="word", special_tokens="drop") == found


def test_spans_of_pairs(server):
    found = spans(
        server,
        [["The bank is closed.", "Tom went to the bank"]],
        ["bank", {"text": "bank", "segment": 1}, {"start": 0, "end": 3, "segment": 1}],
    )
    assert [(span["start"], span["end"]) for span in found] == [(4, 8), (16, 20), (0, 3)]
    assert found[0]["tokens"][0] < found[2]["tokens"][0] < found[1]["tokens"][0]


@pytest.mark.parametrize("city", PARAGRAPHS)
def test_a_sentence_in_its_paragraph_knows_what_it_is_about(server, city):
    """Late chunking (Günther et al. 2024): "it" is the city, which the sentence embedded alone does not say."""
    sentences = PARAGRAPHS[city]
    inside = vectors(spans(server, " ".join(sentences), sentences))
    alone = np.array([result["pooled"] for result in server.attend([city, *sentences], include=["pooled"], decimals=9)["results"]])
    name = alone[0]
    for in_context, by_itself in zip(inside[1:], alone[2:], strict=True):
        assert in_context @ name > by_itself @ name + 0.1


def test_late_chunking_costs_one_forward(server):
    document = " ".join(ALL)
    ends = [i + 1 for i, character in enumerate(document) if character == "."]
    chunks = [{"start": start, "end": end} for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    counted = [server.metric(f"attend_{what}_total") for what in ("texts", "tokens")]
    forwards = server.metric("attend_batch_texts_count")
    body = {"text": document, "spans": chunks, "include": []}
    response = server.client.post("/attend", json=body)
    result = response.json()["results"][0]
    assert len(result["spans"]) == len(chunks) == 9
    assert response.headers["x-compute-tokens"] == str(len(result["tokens"]))
    assert server.metric("attend_batch_texts_count") == forwards + 1
    assert [server.metric(f"attend_{what}_total") for what in ("texts", "tokens")] == [counted[0] + 1, counted[1] + len(result["tokens"])]
    assert [document[span["start"] : span["end"]].strip() for span in result["spans"]] == ALL


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([], "empty"), ("bank", "array"), (["sea"], "'sea'"), ([[1, 3]], "next to each other"), ([{"start": 5, "end": 5}], "5"),
        ([["a"]], "item 0"), (["bank", {"start": 3, "end": 4}, "sea"], "3 to 4"), ([{"start": 3, "end": 4}], "no tokens"), ([[]], "empty"),
    ],
)  # fmt: skip
def test_bad_spans_name_the_field(server, wanted, said):
    response = server.client.post("/attend", json={"text": SENTENCE, "spans": wanted})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "spans")
    assert said in error["message"]
