"""`attend serve`: flags and environment → settings → a server that ends cleanly."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import uvicorn
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from service import logs
from service.app import create_app
from service.machine import cores, prepare
from service.settings import Settings
from service.state import State
from service.versions import version

log = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    """The command line; its options are the fields of Settings."""
    main = argparse.ArgumentParser(prog="attend", description="Contextual embeddings with the attention left in.")
    main.add_argument("--version", action="version", version=version("attend"))
    commands = main.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="start the service",
        description="Every option is an environment variable too: --max-batch-tokens is ATTEND_MAX_BATCH_TOKENS.",
    )
    for name, field in Settings.model_fields.items():
        serve.add_argument("--" + name.replace("_", "-"), dest=name, default=argparse.SUPPRESS, **_option(name, field))
    return main


def _option(name: str, field: FieldInfo) -> dict[str, Any]:
    kind = field.annotation
    default = field.get_default(call_default_factory=True)
    shown = ",".join(default) if isinstance(default, list) else default
    text = f"{field.description}" + (f" (default: {shown})" if shown not in (None, "") and default is not False else "")
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if get_origin(kind) is list:
        return {"action": "append", "metavar": name.rpartition("_")[2].upper(), "help": text}
    choices = [value for value in get_args(kind) if isinstance(value, str)]
    metavar = "{" + ",".join(choices) + "}" if choices else "N" if int in (kind, *get_args(kind)) or kind is float else "TEXT"
    return {"metavar": metavar, "help": text.replace("%", "%%")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exits with 0 after a clean end, 2 when a setting or a model is wrong, with one line that says what."""
    given = vars(parser().parse_args(arguments))
    given.pop("command")
    try:
        settings = Settings(**given)
    except ValidationError as error:
        sys.exit(_complain(error))
    logs.configure(settings.log_format, settings.log_level)
    prepare(settings.threads or cores())
    status = serve(settings)
    if any(thread.daemon for thread in threading.enumerate()):
        # a model that is still in a forward, or being loaded: torch would abort the process if the interpreter went away under it
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


def _complain(error: ValidationError) -> int:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"][:1])
    flag = f"--{name.replace('_', '-')} (ATTEND_{name.upper()}): " if name else ""
    print(f"attend: {flag}{str(first['msg']).removeprefix('Value error, ')}", file=sys.stderr)
    return 2


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; → the exit status."""
    problem: list[str] = []

    def failed(line: str) -> None:
        problem.append(line)
        server.should_exit = True

    app = create_app(settings, failed)
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=1, timeout_keep_alive=75, ws="none",  # the grace period is over by then, see _drain
    )  # fmt: skip
    server = Server(config, app.state.attend)
    try:
        server.run()
    except SystemExit as error:
        return int(error.code or 0)
    if problem:
        print(f"attend: {problem[0]}", file=sys.stderr)
        return 2
    return 0


class Server(uvicorn.Server):
    """uvicorn's server with another end: readiness goes first, what was accepted is finished, and the exit status is 0."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self.state = state

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        """On the first signal drain, on a second one end at once. (uvicorn would raise the signal again afterwards.)"""
        if self.state.draining:
            self.force_exit = self.should_exit = True
            return
        self.state.draining = True
        log.info("%s: finishing what was accepted, for at most %g s", signal.Signals(sig).name, self.state.settings.grace_period)
        loop = self._loop
        loop.call_soon_threadsafe(lambda: loop.create_task(self._drain()))

    async def serve(self, sockets: list[Any] | None = None) -> None:
        """As uvicorn does, with the loop at hand for the signal handler."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def _drain(self) -> None:
        """Wait until nothing is in flight any more, then let uvicorn close."""
        end = asyncio.get_running_loop().time() + self.state.settings.grace_period
        while self.state.busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        self.should_exit = True


if __name__ == "__main__":
    main()
