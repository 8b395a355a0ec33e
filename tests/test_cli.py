"""The command: settings from flags and environment, one line and exit status 2 for what is wrong, a clean end."""

import json
import subprocess
import sys
import time

import pytest

from service.settings import Settings
from tests import tiny
from tests.server import ROOT, serving


def attend(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=90,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **environment},
    )  # fmt: skip


def test_help_lists_every_setting():
    said = attend("serve", "--help").stdout
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in said


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--port", "70000"], {}, "--port (ATTEND_PORT)"),
        ([], {"ATTEND_PORT": "eight"}, "--port (ATTEND_PORT)"),
        (["--dtype", "float8"], {}, "--dtype (ATTEND_DTYPE)"),
        (["--max-length", "0"], {}, "--max-length (ATTEND_MAX_LENGTH)"),
        (["--alias", "short"], {}, "alias 'short' is not NAME=MODEL"),
        (["--api-key-file", "/nowhere"], {}, "/nowhere is not a file"),
        (["--model", "/no/such folder"], {}, "there is no such folder"),
        (["--model", "someone/else"], {}, "someone/else"),
        (["--model", "a/b", "--model", "a/b"], {}, "a/b is given twice"),
        (["--device", "abacus"], {}, "device abacus"),
        (["--default-prompt", "query"], {}, "there is no prompt 'query' for --default-prompt"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_status_2(arguments, environment, said):
    ended = attend("serve", "--port", "0", *arguments, **environment) if "--port" not in arguments and not environment else attend(
        "serve", *arguments, **environment
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("attend: ")
    assert said in last
    assert "Traceback" not in ended.stderr


def test_a_broken_checkpoint(tmp_path):
    folder = tiny.save(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"nothing")
    ended = attend("serve", "--port", "0", "--model", str(folder))
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].startswith("attend: tiny: ")
    assert "is broken" in ended.stderr


def test_environment_and_flags(tmp_path):
    first, second = tiny.save(tmp_path / "one"), tiny.save(tmp_path / "two", "gpt2")
    with serving(
        tmp_path / "log", "--max-body-bytes", "5000", ATTEND_MODEL=f"{first},{second}", ATTEND_LOG_FORMAT="json", ATTEND_MAX_BODY_BYTES="9"
    ) as server:
        assert [m["id"] for m in server.client.get("/info").json()["models"]] == ["one", "two"]
        assert server.client.get("/info").json()["limits"]["max_body_bytes"] == 5000
        assert server.attend("abc", model="two")["model"] == "two"
        response = server.client.post("/attend", json={"text": "a" * 6000})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert "6" in response.json()["error"]["message"]
        assert "5000" in response.json()["error"]["message"]
        chunked = server.client.post("/attend", content=iter([b'{"text": "' + b"a" * 6000, b'"}']))
        assert chunked.status_code == 413
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
    asked = next(line for line in lines if line["message"] == "POST /attend 200")
    assert asked["level"] == "info"
    assert asked["ms"] > 0
    assert len(asked["request_id"]) == 32


def test_alive_from_the_first_second_and_ready_later(tmp_path):
    start = time.monotonic()
    with serving(tmp_path / "log", ready=False) as server:
        while True:
            try:
                alive = server.client.get("/livez")
                break
            except Exception:
                assert time.monotonic() - start < 10
                time.sleep(0.02)
        assert alive.status_code == 200
        early = server.client.post("/attend", json={"text": "a"})
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "not_ready"
        assert int(early.headers["retry-after"]) > 0
        assert server.client.get("/readyz").status_code == 503
        assert server.metric("attend_model_ready") == 0
        server.wait_ready()
        assert server.metric("attend_model_ready") == 1
        assert server.metric("attend_worker_up") == 1
        assert server.stop() == 0


def test_operations(server):
    for path in ("/livez", "/readyz", "/health", "/info", "/metrics", "/openapi.json", "/docs"):
        assert server.client.get(path).status_code == 200, path
    info = server.client.get("/info").json()
    model = info["models"][0]
    assert model["id"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert (model["num_layers"], model["num_heads"], model["d_model"], model["dimensions"]) == (6, 12, 384, 384)
    assert model["max_length"] == 256
    assert model["pooling"] == "mean"
    assert model["attention"]["available"] is True
    assert info["versions"]["torch"].startswith("2.13")
    assert "text" in server.client.get("/openapi.json").text


def test_metrics_are_there_from_the_beginning_and_move(server):
    before = {name: server.metric(name) for name in ("attend_tokens_total", "attend_texts_total", "attend_attention_values_total")}
    server.attend("Tom is going to fish at the river bank", layers="all")
    assert server.metric("attend_tokens_total") == before["attend_tokens_total"] + 11
    assert server.metric("attend_texts_total") == before["attend_texts_total"] + 1
    assert server.metric("attend_attention_values_total") == before["attend_attention_values_total"] + 72 * 121
    names = {line.split("{")[0].split(" ")[0] for line in server.client.get("/metrics").text.splitlines() if not line.startswith("#")}
    for name in (
        "attend_requests_total attend_request_duration_seconds_count attend_stage_duration_seconds_count attend_queue_texts "
        "attend_queue_tokens attend_inflight_requests attend_batch_texts_count attend_batch_tokens_count attend_tokens_total "
        "attend_texts_total attend_attention_values_total attend_response_bytes_total attend_rejected_total attend_nonfinite_total "
        "attend_model_ready attend_worker_up attend_build_info attend_model_info"
    ).split():
        assert name in names, name
    for reason in ("overloaded", "too_large", "deadline", "disconnected", "draining", "invalid"):
        assert f'attend_rejected_total{{reason="{reason}"}}' in server.client.get("/metrics").text
    assert 'route="/attend"' in server.client.get("/metrics").text
