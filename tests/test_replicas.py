"""Three replicas behind a real proxy: under load one is killed and one is told to stop, and whoever retries once never notices."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.crowd import Crowd
from tests.server import Server, free_port, serving

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed (Debian: apt-get install nginx-light)")
REQUESTS = [
    ("/attend", b'{"text": ["a cat", "a dog sat down and would not get up again"]}'),
    ("/attend", b'{"text": "bank", "layers": "all"}'),
]
# A replica that failed is left out for 10 seconds; a POST that was already sent goes to no other replica, so clients see its end.
CONFIG = """
pid {folder}/pid; error_log {folder}/error.log; daemon off; worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream replicas {{ {servers} keepalive 16; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_connect_timeout 2s; }}
  }}
}}
"""


@contextmanager
def proxied(folder: Path, replicas: list[Server]) -> Iterator[int]:
    """The port of an nginx in front of the replicas."""
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{replica.port} max_fails=1 fail_timeout=10s;" for replica in replicas)
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, servers=servers))
    process = subprocess.Popen(
        ["nginx", "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(config)], stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(100):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Server]]:
    """Three replicas of a tiny model, each a process of its own."""
    model = tiny.save(tmp_path / "tiny")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(tmp_path / f"log{i}", "--model", str(model), "--threads", "1", ready=False)) for i in range(3)
        ]
        for server in servers:
            server.wait_ready()
        yield servers


@pytest.mark.slow
def test_replicas_go_under_load_and_nobody_who_retries_once_sees_an_error(tmp_path: Path, replicas: list[Server]) -> None:
    killed, told, last = replicas
    assert len({replica.attend("a cat")["results"][0]["pooled"][0] for replica in replicas}) == 1
    assert [replica.metric("attend_texts_total") for replica in replicas] == [1, 1, 1], "each counts for itself"
    with proxied(tmp_path, replicas) as port, Crowd(port, REQUESTS, clients=12, retry=True) as crowd:
        time.sleep(2)
        before = [replica.metric("attend_texts_total") for replica in replicas]
        killed.process.kill()
        assert killed.process.wait(30) == -signal.SIGKILL
        time.sleep(2)
        assert told.stop() == 0
        time.sleep(2)
        outcome = crowd.stop()
    assert min(before) > 1, "the proxy must have used all three"
    assert last.metric("attend_texts_total") > before[2]
    assert outcome.lost == []
    assert outcome.refused == {}
    assert outcome.answered > 100
    assert 0 < outcome.retried < 60, "what was under way when a replica went, and hardly more"
    print(f"\n{outcome.answered} answered, {outcome.retried} of them at the second try")
