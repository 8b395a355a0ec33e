"""Log records as lines of text or of JSON, on standard error."""

import logging
import sys
from datetime import UTC, datetime

import orjson


class TextFormat(logging.Formatter):
    """`12:00:00 info service.http: POST /attend 200 request_id=… ms=12.3`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback under it where there is one."""
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = "".join(f" {key}={value}" for key, value in getattr(record, "fields", {}).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{when} {record.levelname.lower()} {record.name}: {record.getMessage()}{fields}{trace}"


class JsonFormat(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """time (RFC 3339, UTC), level, logger, message, the record's own fields, and error with the traceback."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure(form: str, level: str) -> None:
    """Send everything that is at least as important as `level` to standard error in that form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormat() if form == "json" else TextFormat())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("service", "models", "uvicorn.error"):
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True
