"""Starts the service as its users do: a process, a port, the environment."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running service; `client` speaks to it, `log` is what it wrote."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.port, self.log_file = process, port, log
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_ready(self, seconds: float = 60.0) -> None:
        """Until /readyz says so; fails with the log when the process ends or the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self.client.get("/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready: exit status {self.process.poll()}\n{self.log}")

    def attend(self, text: Any, **fields: Any) -> dict[str, Any]:
        """POST /attend → its results and all; fails with the error when there is one."""
        response = self.client.post("/attend", json={"text": text, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str, **labels: str) -> float:
        """The value of a series of /metrics; 0 when it is not there."""
        for line in self.client.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{key}="{label}"' in head for key, label in labels.items()):
                return float(value)
        return 0.0

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(log: Path, *flags: str, ready: bool = True, **environment: str) -> Iterator[Server]:
    """A service with these flags on a free port; it is ended with the block."""
    port = free_port()
    command = [sys.executable, "-m", "service", "serve", "--port", str(port), *flags]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ATTEND_")}
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=sink, stdout=sink, text=True, env={**inherited, "HF_HUB_OFFLINE": "1", **environment}
        )
    server = Server(process, port, log)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.client.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
