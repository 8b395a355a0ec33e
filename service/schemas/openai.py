"""The body of POST /v1/embeddings, as OpenAI's SDKs send it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from service.schemas.checks import INPUTS_SCHEMA, inputs

Inputs = Annotated[list[Any], BeforeValidator(inputs), WithJsonSchema(INPUTS_SCHEMA)]


class EmbeddingRequest(BaseModel):
    """Fields that OpenAI does not have are ignored, as OpenAI's own server lets SDKs add them; three more are read."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{"input": ["The river bank"], "encoding_format": "float"}]})

    input: Inputs = Field(description="a text, many, token ids of one, or of many; token ids go to the model as they are")
    model: str | None = Field(None, description="which model; the first one served unless given")
    encoding_format: Literal["float", "base64"] | None = Field("float", description="base64: little-endian float32; null: float")
    dimensions: int | None = Field(None, ge=1, strict=True, description="only the first so many numbers, scaled to length 1")
    user: Any = Field(None, description="ignored")
    prompt: str | None = Field(None, description="put before each text (beyond OpenAI)")
    prompt_name: str | None = Field(None, description="the checkpoint's prompt of that name, put before each text (beyond OpenAI)")
    truncate: bool | None = Field(False, strict=True, description="cut texts that are too long instead of refusing them (beyond OpenAI)")
