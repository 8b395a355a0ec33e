"""What a model is called. Free of torch, so that the service can say names before anything is loaded."""

import re
from pathlib import Path

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def served_name(spec: str) -> str:
    """The name under which a `--model` is served: a folder's own name, or a hub id without its revision."""
    folder = Path(spec).expanduser()
    return folder.resolve().name if folder.is_dir() else spec.partition("@")[0]
