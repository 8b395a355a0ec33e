"""Every refusal, once: its status, its code, and its body in the dialect of the route that it was asked on.

attend's and OpenAI's routes answer `{"error": {"message", "type", "param", "code"}}`, TEI's `{"error", "error_type"}`,
Ollama's `{"error"}`. Messages name the field, what is wrong with its value, and the limit; never the text, a path or a trace.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

Dialect = Literal["attend", "tei", "ollama"]

TEI_ROUTES = frozenset(
    ["/embed", "/embed_all", "/embed_sparse", "/similarity", "/tokenize", "/decode", "/predict", "/rerank", "/health", "/info"]
)

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
          406: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error"}  # fmt: skip
_TEI_TYPES = {"overloaded": "Overloaded", "nonfinite_output": "Backend", "internal": "Backend", "not_ready": "Unhealthy",
              "draining": "Unhealthy", "deadline_exceeded": "Overloaded", "empty": "Empty",
              "invalid_api_key": "Unauthorized"}  # fmt: skip
_TEI_STATUS = {"text_too_long": 422, "invalid_request": 422, "request_too_large": 422, "nonfinite_output": 424, "internal": 424}


@dataclass(eq=False)
class AttendError(Exception):
    """A request that is refused. `param` names the field that is at fault."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def invalid(message: str, param: str | None = None) -> AttendError:
    """400: the request is not what the contract says."""
    return AttendError(400, "invalid_request", message, param)


def empty(message: str, param: str | None = None) -> AttendError:
    """400: there is no text where one must be (TEI has a name of its own for that)."""
    return AttendError(400, "empty", message, param)


def text_too_long(message: str, param: str | None = None) -> AttendError:
    """400: more tokens than the model takes."""
    return AttendError(400, "text_too_long", message, param)


def answer_too_large(message: str, param: str | None = None) -> AttendError:
    """413: what is asked for is more than one answer may hold."""
    return AttendError(413, "answer_too_large", message, param)


def too_many(message: str, param: str | None = None) -> AttendError:
    """413: more than could ever be accepted, however quiet the service is."""
    return AttendError(413, "request_too_large", message, param)


def body_too_large(size: int | None, limit: int) -> AttendError:
    """413: `size` (None: it was not announced) bytes of body are over the limit."""
    said = f"{size} bytes" if size is not None else "more"
    return AttendError(413, "body_too_large", f"the body has {said}; the limit is {limit} bytes: send fewer texts in a request")


def model_not_found(name: str, known: list[str]) -> AttendError:
    """404; `known` has the nearest first."""
    return AttendError(404, "model_not_found", f"there is no model {name!r}; served are: {', '.join(known)}", "model")


def overloaded(waiting: int, limit: int, seconds: float) -> AttendError:
    """429: too many tokens are waiting; they will be done in about so many seconds."""
    retry = {"retry-after": str(max(1, math.ceil(seconds)))}
    return AttendError(429, "overloaded", f"{waiting} tokens are waiting, and no more than {limit} may; try again", None, retry)


def not_ready(name: str) -> AttendError:
    """503: the model is still being loaded."""
    return AttendError(503, "not_ready", f"the model {name} is not loaded yet; try again", None, {"retry-after": "2"})


def worker_down(name: str) -> AttendError:
    """503: the model's worker has just failed and is being started again."""
    return AttendError(503, "not_ready", f"the worker of {name} is being started again; try again", None, {"retry-after": "2"})


def draining() -> AttendError:
    """503: the service is shutting down."""
    return AttendError(503, "draining", "the service is shutting down; try another replica", None, {"retry-after": "1"})


def deadline_exceeded(seconds: float) -> AttendError:
    """504: the request was not done in time."""
    return AttendError(504, "deadline_exceeded", f"the request was not done within {seconds:g} s")


def nonfinite(name: str) -> AttendError:
    """500: the model gave numbers that are not finite."""
    return AttendError(500, "nonfinite_output", f"the model {name} gave numbers that are not finite for this text")


def internal(request_id: str) -> AttendError:
    """500: a fault of ours; the log has it under the request's id."""
    return AttendError(500, "internal", f"something went wrong; the log has it under the request id {request_id}")


def from_validation(error: ValidationError) -> AttendError:
    """The first thing that pydantic found wrong, with the field's name as `param`."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = [str(part) for part in first["loc"][:1]]
    param = location[0] if location else None
    message = str(first["msg"]).removeprefix("Value error, ")
    match first["type"]:
        case "empty":
            return empty(f"{param}: {message}", param)
        case "json_invalid":
            half = ": half of a surrogate pair is no character" if "surrogate" in message or "hex escape" in message else ""
            return invalid(f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}{half}")
        case "extra_forbidden":
            return invalid(f"there is no field {param}", param)
        case "missing":
            return invalid(f"the field {'.'.join(map(str, first['loc']))} is missing", param)
        case "model_type" | "model_attributes_type":
            return invalid(f"{param or 'the body'} must be a JSON object, not {_kind(error)}", param)
    return invalid(f"{param}: {message}" if param else message, param)


def _kind(error: ValidationError) -> str:
    return type(error.errors()[0].get("input")).__name__


def dialect_of(path: str) -> Dialect:
    """Whose error shape a path speaks."""
    if path in TEI_ROUTES or path == "/":
        return "tei"
    return "ollama" if path.startswith("/api/") else "attend"


def render(error: AttendError, dialect: Dialect) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in a dialect."""
    if dialect == "tei":
        kind = _TEI_TYPES.get(error.code, "Validation" if error.status < 500 else "Backend")
        return _TEI_STATUS.get(error.code, error.status), {"error": error.message, "error_type": kind}
    if dialect == "ollama":
        return error.status, {"error": error.message}
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    code = "invalid_request" if error.code == "empty" else error.code
    return error.status, {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}
