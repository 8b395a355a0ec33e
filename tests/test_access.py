"""API keys and CORS."""

import pytest

from tests.server import serving

KEYS = ("first-secret", "second-secret", "third-secret", "fourth-secret")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    place = tmp_path_factory.mktemp("guarded")
    (place / "keys").write_text("# for the tests\nthird-secret\n\nfourth-secret\n")
    flags = ["--api-key-file", str(place / "keys"), "--cors-origin", "https://page.example", "--log-level", "debug"]
    with serving(place / "log", *flags, ATTEND_API_KEY="first-secret,second-secret") as server:
        yield server


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", ["/attend", "/v1/embeddings", "/embed", "/api/embed"])
def test_each_key_opens(guarded, key, path):
    body = {"text": "a"} if path == "/attend" else {"inputs": "a"} if path == "/embed" else {"input": "a", "model": guarded_model(guarded)}
    assert guarded.client.post(path, json=body, headers={"authorization": f"Bearer {key}"}).status_code == 200


def guarded_model(server) -> str:
    return server.client.get("/info").json()["models"][0]["id"]


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong"}, {"authorization": "first-secret"},
                                    {"authorization": "Basic first-secret"}, {"authorization": "Bearer first-secre"}])  # fmt: skip
def test_nothing_else_opens(guarded, header):
    response = guarded.client.post("/v1/embeddings", json={"input": "a"}, headers=header)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert set(guarded.client.post("/embed", json={"inputs": "a"}, headers=header).json()) == {"error", "error_type"}


def test_operations_stay_open(guarded):
    for path in ("/livez", "/readyz", "/health", "/info", "/metrics", "/docs", "/openapi.json"):
        assert guarded.client.get(path).status_code == 200, path


def test_keys_are_never_logged(guarded):
    guarded.client.post("/v1/embeddings", json={"input": "a"}, headers={"authorization": "Bearer first-secret"})
    guarded.client.post("/v1/embeddings", json={"input": "a"}, headers={"authorization": "Bearer guessed-secret"})
    assert "POST /v1/embeddings" in guarded.log
    assert "secret" not in guarded.log


def test_preflight_allows_authorization(guarded):
    asked = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = guarded.client.options("/attend", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert (
        "access-control-allow-origin" not in guarded.client.options("/attend", headers={**asked, "origin": "https://other.example"}).headers
    )


def test_pages_can_read_answers_and_errors(guarded):
    for header, status in (({"authorization": "Bearer first-secret"}, 200), ({}, 401)):
        response = guarded.client.post("/attend", json={"text": "a"}, headers={"origin": "https://page.example", **header})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://page.example"


def test_without_the_setting_no_page_may(server):
    response = server.client.get("/info", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers
