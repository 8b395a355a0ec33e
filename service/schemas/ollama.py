"""The body of Ollama's POST /api/embed."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from service.schemas.checks import TEXTS_SCHEMA, texts

Texts = Annotated[list[str], BeforeValidator(texts), WithJsonSchema(TEXTS_SCHEMA)]


class EmbedRequest(BaseModel):
    """`options` and `keep_alive` are Ollama's and mean nothing here."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{"model": "all-minilm", "input": ["The river bank"]}]})

    model: str = Field(description="which model, with or without the tag :latest")
    input: Texts = Field(description="a text, or many")
    truncate: bool | None = Field(True, strict=True, description="cut texts that are too long, also when null; false: refuse them")
    dimensions: int | None = Field(None, ge=0, strict=True, description="only the first so many numbers, scaled to length 1; 0: all")
    options: Any = Field(None, description="ignored")
    keep_alive: Any = Field(None, description="ignored")
