"""Which versions run."""

import platform
from importlib import metadata


def version(distribution: str) -> str:
    """The installed version of a distribution, or "unknown"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """The versions that decide what an answer is."""
    names = ("attend", "torch", "transformers", "sentence-transformers", "tokenizers")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}
