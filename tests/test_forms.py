"""The forms of an answer: safetensors, NDJSON, base64, bertviz, gzip, and what Accept asks for."""

import asyncio
import base64
import gzip
import json
import threading
import zlib
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from safetensors import safe_open
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from service.compression import INLINE, SMALLEST, Compression, accepts_gzip

SENTENCE = "Tom is going to fish at the river bank"
SAFETENSORS, NDJSON = "application/x-safetensors", "application/x-ndjson"
EVERYTHING = {
    "layers": "all", "hidden_layers": [0, -1], "spans": ["river bank", "Tom"], "focus": "bank", "unit": "word",
    "reduce": ["entropy", {"rollout": 0}, {"top_k": 2}, "kind", "norms"],
}  # fmt: skip


def post(server, body: dict, accept: str | None = None, **parameters: str) -> httpx.Response:
    headers = {} if accept is None else {"accept": accept}
    return server.client.post("/attend", json=body, headers=headers, params=parameters)


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_safetensors_opens_and_is_the_json(server, tmp_path):
    body = {"text": [SENTENCE, "the river bank of Tom"], **EVERYTHING, "decimals": None}
    exact = post(server, body).json()
    response = post(server, body, SAFETENSORS)
    assert response.headers["content-type"] == SAFETENSORS
    arrays, tensors = safetensors.numpy.load(response.content), safetensors.torch.load(response.content)
    assert set(arrays) == set(tensors)
    for name, array in arrays.items():
        assert array.dtype == np.float32
        assert np.array_equal(tensors[name].numpy(), array)
    for i, result in enumerate(exact["results"]):
        reductions = result["reductions"]
        expected = {
            "pooled": result["pooled"],
            "embeddings": result["embeddings"],
            "attention": result["attention"]["weights"],
            "hidden_states": result["hidden_states"]["values"],
            **{f"spans.{k}": span["vector"] for k, span in enumerate(result["spans"])},
            **{f"reductions.{name}": reductions[name]["values"] for name in ("entropy", "rollout", "top_k", "norms")},
            **{f"reductions.kind.{name}": values for name, values in reductions["kind"]["figures"].items()},
        }
        assert {name for name in arrays if name.startswith(f"{i}.")} == {f"{i}.{name}" for name in expected}
        for name, values in expected.items():
            assert np.array_equal(arrays[f"{i}.{name}"], np.array(values, dtype=np.float32)), name
    (tmp_path / "answer").write_bytes(response.content)
    with safe_open(tmp_path / "answer", "np") as opened:
        described = json.loads(opened.metadata()["attend"])
    assert (described["model"], described["usage"]) == (exact["model"], exact["usage"])
    for described_result, result in zip(described["results"], exact["results"], strict=True):
        assert without_arrays(described_result) == without_arrays(result)
        assert described_result["reductions"]["top_k"]["keys"] == result["reductions"]["top_k"]["keys"]
        assert described_result["reductions"]["kind"]["values"] == result["reductions"]["kind"]["values"]


def without_arrays(result: dict) -> dict:
    """An answer's tokens, words, axes and names; tensors are in the file, not in its description."""
    arrays = {"pooled", "embeddings", "vector", "weights", "values", "figures"}
    if isinstance(result, dict):
        return {key: without_arrays(value) for key, value in result.items() if key not in arrays}
    return [without_arrays(item) for item in result] if isinstance(result, list) else result


def test_safetensors_of_nothing_but_tokens(server):
    response = post(server, {"text": "a", "include": []}, SAFETENSORS)
    assert safetensors.numpy.load(response.content) == {}


# ── base64 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_base64_everywhere(server):
    exact = post(server, {"text": SENTENCE, **EVERYTHING, "decimals": None}).json()["results"][0]
    packed = post(server, {"text": SENTENCE, **EVERYTHING, "encoding_format": "base64"}).json()["results"][0]

    def check(plain: object, value: object) -> int:
        if isinstance(value, dict) and "data" in value:
            assert list(value) == ["shape", "dtype", "data"]
            assert value["dtype"] == "float32"
            array = np.frombuffer(base64.b64decode(value["data"], validate=True), "<f4").reshape(value["shape"])
            assert np.array_equal(array, np.array(plain, dtype=np.float32))
            return 1
        if isinstance(value, dict):
            assert list(value) == list(plain)
            return sum(check(plain[key], value[key]) for key in value)
        if isinstance(value, list):
            return sum(check(one, other) for one, other in zip(plain, value, strict=True))
        assert value == plain
        return 0

    assert check(exact, packed) == 4 + 2 + 4 + 5  # pooled, embeddings, hidden states, attention · spans · reductions · kind's figures


# ── NDJSON ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lines_come_in_order_and_the_last_says_model_and_usage(server):
    texts = [SENTENCE, "a", "b " * 200, "the end"]
    whole = post(server, {"text": texts, "layers": "all"}).json()
    response = post(server, {"text": texts, "layers": "all"}, NDJSON)
    assert response.headers["content-type"] == NDJSON
    assert response.content.endswith(b"\n")
    lines = [json.loads(line) for line in response.content.splitlines()]
    assert len(lines) == 5
    assert lines[-1] == {"model": whole["model"], "usage": whole["usage"]}
    for line, result in zip(lines, whole["results"], strict=False):
        assert without_arrays(line) == without_arrays(result)
        assert np.array(line["attention"]["weights"]) == pytest.approx(np.array(result["attention"]["weights"]), abs=2e-6)


def test_a_line_holds_no_line_break(server):
    response = post(server, {"text": ["one\ntwo\r\n\u2028three", "x"], "include": []}, NDJSON)
    assert response.content.count(b"\n") == 3
    assert [w["text"] for w in json.loads(response.content.split(b"\n")[0])["words"]] == ["one", "two", "three"]


# ── Accept ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ("*/*", "application/json"), ("application/*", "application/json"), ("application/json, text/plain", "application/json"),
        (SAFETENSORS, SAFETENSORS), (f"{SAFETENSORS}, application/json;q=0.5", SAFETENSORS),
        (f"{NDJSON};q=0.3, {SAFETENSORS};q=0.8", SAFETENSORS),
        (f"{NDJSON}; q=0.9, application/json; q=0.1", NDJSON), (f"{SAFETENSORS};q=0, */*;q=0.1", "application/json"),
    ],
)  # fmt: skip
def test_accept_chooses_the_form(server, accept, media):
    response = post(server, {"text": "a", "include": ["pooled"]}, accept)
    assert response.status_code == 200
    assert response.headers["content-type"] == media


@pytest.mark.parametrize("accept", ["text/html", "image/png, text/*", "application/json;q=0", "application/xml"])
def test_accept_that_cannot_be_met(server, accept):
    response = post(server, {"text": "a"}, accept)
    assert response.status_code == 406
    error = response.json()["error"]
    assert error["param"] == "accept"
    assert all(media in error["message"] for media in ("application/json", SAFETENSORS, NDJSON))


# ── bertviz ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bertviz(server):
    whole = post(server, {"text": SENTENCE, "layers": [0, 2]}).json()["results"][0]
    view = post(server, {"text": SENTENCE, "layers": [0, 2]}, format="bertviz").json()
    (attention,) = view["attention"]
    assert np.array(attention["attn"]).shape == (2, 12, 11, 11)
    assert np.array(attention["attn"]) == pytest.approx(np.array(whole["attention"]["weights"]), abs=2e-6)
    assert attention["left_text"] == attention["right_text"] == [token["text"] for token in whole["tokens"]]
    assert attention["name"] is None
    assert view["default_filter"] == "0"
    assert view["include_layers"] == [0, 2]
    assert view["include_heads"] == list(range(12))
    assert view["total_heads"] == 12


def test_bertviz_of_less(server):
    asked = {"text": "Tom unbelievable", "heads": [7, 3], "unit": "word", "focus": "Tom", "layers": "all"}
    view = post(server, asked, format="bertviz").json()
    assert view["attention"][0]["left_text"] == ["Tom"]
    assert view["attention"][0]["right_text"] == ["Tom", "unbelievable", "[CLS]", "[SEP]"]
    assert np.array(view["attention"][0]["attn"]).shape == (6, 2, 1, 4)
    assert (view["include_heads"], view["total_heads"]) == ([7, 3], 8)
    combined = post(server, {**asked, "combine_heads": "mean"}, format="bertviz").json()
    assert (combined["include_heads"], np.array(combined["attention"][0]["attn"]).shape) == ([0], (6, 1, 1, 4))
    assert len(post(server, {"text": ["a", "b"]}, format="bertviz").json()) == 2


@pytest.mark.parametrize(
    ("body", "accept", "form", "status", "field"),
    [
        ({"include": ["pooled"]}, None, "bertviz", 400, "include"), ({"reduce": ["kind"]}, None, "bertviz", 400, "reduce"),
        ({"encoding_format": "base64"}, None, "bertviz", 400, "encoding_format"), ({}, SAFETENSORS, "bertviz", 406, "accept"),
        ({}, None, "csv", 400, "format"),
    ],
)  # fmt: skip
def test_bertviz_refuses_what_it_does_not_show(server, body, accept, form, status, field):
    forwards = server.metric("attend_texts_total")
    response = post(server, {"text": "a", **body}, accept, format=form)
    assert (response.status_code, response.json()["error"]["param"]) == (status, field)
    assert server.metric("attend_texts_total") == forwards


# ── gzip ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def raw(server, body: dict, encoding: str, accept: str = "*/*") -> tuple[httpx.Headers, bytes]:
    """The answer as it is on the line."""
    headers = {"accept-encoding": encoding, "accept": accept}
    with server.client.stream("POST", "/attend", json=body, headers=headers) as response:
        return response.headers, b"".join(response.iter_raw())


@pytest.mark.parametrize("accept", ["application/json", NDJSON])
def test_an_answer_is_compressed_when_asked(server, accept):
    body = {"text": [SENTENCE, SENTENCE], "layers": "all"}
    plain_headers, plain = raw(server, body, "identity", accept)
    headers, packed = raw(server, body, "gzip", accept)
    assert "content-encoding" not in plain_headers
    assert headers["content-encoding"] == "gzip"
    assert "accept-encoding" in headers["vary"].lower()
    assert "accept-encoding" in plain_headers["vary"].lower()
    assert "content-length" not in headers
    assert headers["content-type"] == plain_headers["content-type"] == accept
    assert gzip.decompress(packed) == plain
    assert len(packed) < 0.5 * len(plain)


def test_safetensors_are_sent_as_they_are(server):
    headers, content = raw(server, {"text": SENTENCE, "layers": "all"}, "gzip", SAFETENSORS)
    assert "content-encoding" not in headers
    assert len(content) == int(headers["content-length"])
    assert "0.attention" in safetensors.numpy.load(content)


def test_short_answers_are_not_compressed(server):
    headers, body = raw(server, {"text": "a", "include": []}, "gzip")
    assert "content-encoding" not in headers
    assert len(body) == int(headers["content-length"]) < SMALLEST


def application() -> Compression:
    """Answers of several kinds, compressed."""

    async def pieces(count: int, size: int) -> AsyncIterator[bytes]:
        for i in range(count):
            yield bytes([97 + i]) * size

    async def streamed(request: Request) -> Response:
        return StreamingResponse(pieces(3, int(request.path_params["size"])), media_type="text/plain")

    async def whole(request: Request) -> Response:
        return PlainTextResponse("x" * int(request.path_params["size"]))

    async def packed(_: Request) -> Response:
        return Response(b"y" * 2000, headers={"content-encoding": "br"})

    async def none(_: Request) -> Response:
        return Response(status_code=204)

    routes = [Route("/whole/{size}", whole), Route("/streamed/{size}", streamed), Route("/none", none), Route("/packed", packed)]
    return Compression(Starlette(routes=routes))


async def messages(app: Compression, path: str, method: str = "GET") -> list[dict]:
    """What the application sends, message by message."""
    sent: list[dict] = []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"accept-encoding", b"gzip")],
        "root_path": "",
    }

    async def receive() -> dict:
        await asyncio.sleep(10)
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("size", [10, 5000, INLINE + 1, 300_000])
def test_each_piece_can_be_read_when_it_comes(size):
    head, *parts = asyncio.run(messages(application(), f"/streamed/{size}"))
    assert (b"content-encoding", b"gzip") in head["headers"]
    reader = zlib.decompressobj(wbits=31)
    for i, part in enumerate(parts[:3]):
        assert reader.decompress(part["body"]) == bytes([97 + i]) * size
        assert part["more_body"] is True
    assert reader.decompress(parts[-1]["body"]) == b""
    assert reader.eof
    assert parts[-1]["more_body"] is False


def test_what_is_left_alone():
    for path, method in (("/whole/1023", "GET"), ("/none", "GET"), ("/whole/9999", "HEAD")):
        head, *_ = asyncio.run(messages(application(), path, method))
        assert b"content-encoding" not in dict(head["headers"])
    head, body = asyncio.run(messages(application(), "/packed"))
    assert dict(head["headers"])[b"content-encoding"] == b"br"
    assert body["body"] == b"y" * 2000
    head, body = asyncio.run(messages(application(), "/whole/1024"))
    assert b"content-length" not in dict(head["headers"])
    assert gzip.decompress(body["body"]) == b"x" * 1024


def test_large_pieces_are_compressed_off_the_event_loop(monkeypatch):
    threads: list[int] = []
    make = zlib.compressobj

    class Noting:
        def __init__(self, *args: int, **fields: int) -> None:
            self.inner = make(*args, **fields)

        def compress(self, piece: bytes) -> bytes:
            threads.append(threading.get_ident())
            return self.inner.compress(piece)

        def flush(self, mode: int) -> bytes:
            return self.inner.flush(mode)

    monkeypatch.setattr("service.compression.zlib.compressobj", Noting)
    asyncio.run(messages(application(), "/whole/100000"))
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (["gzip"], True), (["gzip, deflate, br"], True), (["deflate", "GZIP;q=0.5"], True), (["*"], True),
        (["gzip;q=0"], False), (["gzip; q=0.0"], False),
        (["*;q=0"], False), (["*", "gzip;q=0"], False), (["identity"], False), ([""], False), ([], False), (["br, deflate"], False),
    ],
)  # fmt: skip
def test_accept_encoding(values, wanted):
    assert accepts_gzip(values) is wanted
