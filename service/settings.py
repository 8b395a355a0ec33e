"""One table of options: each field is a flag of `attend serve`, an environment variable, and a line of the documentation.

`--max-batch-tokens` is `ATTEND_MAX_BATCH_TOKENS` is `Settings.max_batch_tokens`. A flag wins over the environment.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from models.names import DEFAULT_MODEL, served_name


def _listed(value: Any) -> Any:
    """What the environment has as `a,b` is a list of both."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[list[str], NoDecode, BeforeValidator(_listed)]


class Settings(BaseSettings):
    """Everything that can be set. Raises pydantic.ValidationError for a value that cannot be."""

    model_config = SettingsConfigDict(env_prefix="ATTEND_", env_ignore_empty=True, frozen=True, protected_namespaces=())

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    root_path: str = Field("", description="path under which a proxy serves this service, for the links in /docs")

    model: Names = Field(
        [DEFAULT_MODEL],
        min_length=1,
        description="a local folder, or a hub id (owner/name, owner/name@revision); repeat for several models",
    )
    alias: Names = Field([], description="another name for a model, NAME=MODEL; repeat for several")
    device: str = Field("auto", description="cpu, cuda, cuda:1 …; auto takes the GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="numbers to compute with; auto is float32 on a CPU and what the checkpoint was saved in on a GPU"
    )
    compile: bool = Field(False, description="let torch compile the model (needs a C++ compiler on a CPU); recording runs uncompiled")
    max_length: int | None = Field(None, ge=1, description="tokens a text, special tokens included; the checkpoint's own limit unless set")
    default_prompt: str = Field("", description="name of the checkpoint's prompt that is put before texts when a request names none")
    threads: int = Field(
        0, ge=0, description="threads to compute with; 0 takes as many as the machine, the affinity and the cgroup quota allow"
    )

    max_batch_tokens: int = Field(0, ge=0, description="tokens in one forward; 0 takes 2048 on a CPU and 16384 on a GPU")
    max_queue_tokens: int = Field(131072, ge=1, description="tokens that may wait; more are refused with 429")
    max_request_texts: int = Field(2048, ge=1, description="texts in one request")
    max_request_tokens: int = Field(300_000, ge=1, description="tokens in one request of the OpenAI dialect")
    max_client_batch_size: int = Field(32, ge=1, description="texts in one request of the TEI dialect")
    max_attention_values: int = Field(20_000_000, ge=0, description="attention weights computed for one request")
    max_answer_bytes: int = Field(512 * 2**20, ge=1, description="bytes in one answer")
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="bytes in one request's body")
    request_timeout: float = Field(60.0, gt=0, description="seconds until a request is given up with 504")
    worker_timeout: float = Field(120.0, gt=0, description="seconds one batch may take until its worker counts as hanging and is replaced")
    grace_period: float = Field(30.0, ge=0, description="seconds that accepted requests may take to finish after SIGTERM")

    api_key: Names = Field([], description="a key that clients must send as Authorization: Bearer KEY; repeat for several; none: open")
    api_key_file: Path | None = Field(None, description="a file with more such keys, one a line")
    cors_origin: Names = Field([], description="an origin whose pages may call, as https://example.org, or *; repeat for several")

    log_format: Literal["text", "json"] = Field("text", description="one line a record, to read or to parse")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="the least important records to write")

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        names = [served_name(spec) for spec in self.model]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"model {twice} is given twice; each is served under a name of its own")
        for alias in self.alias:
            name, _, target = alias.partition("=")
            if not name or not target:
                raise ValueError(f"alias {alias!r} is not NAME=MODEL")
        if self.api_key_file is not None and not self.api_key_file.is_file():
            raise ValueError(f"api-key-file {self.api_key_file} is not a file")
        return self

    def keys(self) -> frozenset[str]:
        """All API keys, from the flag, the environment and the file."""
        lines = self.api_key_file.read_text(encoding="utf-8").splitlines() if self.api_key_file else []
        return frozenset([*self.api_key, *(line.strip() for line in lines if line.strip() and not line.startswith("#"))])
