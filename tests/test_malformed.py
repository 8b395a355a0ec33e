"""Bodies by the hundred, most of them wrong: whatever comes, the answer is no fault of ours and has the dialect's shape."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.errors import dialect_of

ROUTES = {
    "/attend": ["text", "model", "include", "layers", "heads", "combine_heads", "hidden_layers", "focus", "unit", "special_tokens", "spans",
                "truncate", "encoding_format", "decimals", "reduce"],
    "/v1/embeddings": ["input", "model", "encoding_format", "dimensions", "user", "prompt", "prompt_name", "truncate"],
    "/embed": ["inputs", "normalize", "dimensions", "truncate", "truncation_direction", "prompt_name"],
    "/embed_all": ["inputs", "truncate", "truncation_direction", "prompt_name"],
    "/similarity": ["inputs", "parameters"],
    "/tokenize": ["inputs", "add_special_tokens", "prompt_name"],
    "/decode": ["ids", "skip_special_tokens"],
    "/api/embed": ["model", "input", "truncate", "dimensions", "options", "keep_alive"],
}  # fmt: skip
WORDS = st.sampled_from(
    ["", "a", "the river bank", "last", "all", "mean", "token", "word", "drop", "base64", "Left", "entropy", "sentence", "\x00", "😀"]
)
NUMBERS = st.one_of(st.integers(-3, 14), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["text", "start", "end", "occurrence", "segment", "top_k", "source_sentence", "sentences"]), inner, max_size=3
        ),
    ),
    max_leaves=8,
)


def shaped(path: str, body: dict) -> bool:
    keys = {"tei": {"error", "error_type"}, "ollama": {"error"}, "attend": {"error"}}[dialect_of(path)]
    return set(body) == keys and (dialect_of(path) != "attend" or set(body["error"]) == {"message", "type", "param", "code"})


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_is_our_fault(server, path):
    fields = ROUTES[path]

    @given(st.dictionaries(st.sampled_from([*fields, "unknown"]), VALUES, max_size=5))
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def check(body):
        if fields[0] not in body and len(body) % 2:
            body[fields[0]] = "the river bank"
        response = server.client.post(path, content=json.dumps(body, ensure_ascii=True))
        assert response.status_code < 500, (body, response.text)
        if response.status_code >= 400:
            assert shaped(path, response.json()), response.text

    check()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "raw", [b"", b"null", b"[]", b"{", b"\xff", b'{"a":' * 5000, b"1" * 5000, b'{"text": "\\ud83d"}', b'{"input": "\\udc00"}']
)
def test_what_is_no_object(server, path, raw):
    response = server.client.post(path, content=raw)
    assert 400 <= response.status_code < 500
    assert shaped(path, response.json())


def test_references_in_our_openapi_lead_somewhere(server):
    document = server.client.get("/openapi.json").json()

    def references(value: object) -> set[str]:
        if isinstance(value, dict):
            return {value["$ref"]} if "$ref" in value else set().union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    for reference in references(document):
        assert reference.startswith("#/"), reference
        place = document
        for part in reference[2:].split("/"):
            assert part in place, reference
            place = place[part]


@pytest.mark.slow
def test_by_our_own_openapi(server):
    """schemathesis makes requests from the schema, right and wrong ones; none may be a server error."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json").exclude(path="/").exclude(path_regex="/v1/models/.*")
    checks = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        def check(case):
            response = case.call(base_url=server.url)
            assert response.status_code < 500 or response.status_code == 503, response.text

        check()
        checks += 1
    assert checks >= 15
