"""The bodies of TEI's routes (text-embeddings-inference 1.9)."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from service.schemas.checks import IDS_SCHEMA, INPUTS_SCHEMA, TEXT_SCHEMA, TEXTS_SCHEMA, inputs, is_ids, kind_of, text, texts, wrong


def _direction(value: Any) -> str:
    if value is None:
        return "right"
    if not isinstance(value, str) or value not in ("Left", "Right", "left", "right"):
        raise wrong(f"must be 'Left' or 'Right', not {value!r}")
    return value.lower()


def _ids(value: Any) -> list[list[int]]:
    if is_ids(value):
        return [list(value)]
    if not isinstance(value, list) or not value or not all(is_ids(item) for item in value):
        raise wrong(f"must be an array of token ids, or of such arrays, not {'an empty array' if value == [] else kind_of(value)}")
    return [list(item) for item in value]


def _source(value: Any) -> str:
    return text(value, "source_sentence")


Inputs = Annotated[list[Any], BeforeValidator(inputs), WithJsonSchema(INPUTS_SCHEMA)]
Texts = Annotated[list[str], BeforeValidator(texts), WithJsonSchema(TEXTS_SCHEMA)]
Sentences = Annotated[list[str], BeforeValidator(texts), WithJsonSchema({"type": "array", "items": TEXT_SCHEMA, "minItems": 1})]
Source = Annotated[str, BeforeValidator(_source), WithJsonSchema(TEXT_SCHEMA)]
Ids = Annotated[list[list[int]], BeforeValidator(_ids), WithJsonSchema({"oneOf": [IDS_SCHEMA, {"type": "array", "items": IDS_SCHEMA}]})]
Direction = Annotated[str, BeforeValidator(_direction), WithJsonSchema({"enum": ["Left", "Right", "left", "right", None]})]


class Reading(BaseModel):
    """How texts are read; TEI's clients may send fields that TEI does not know, which are ignored."""

    model_config = ConfigDict(extra="ignore")

    truncate: bool | None = Field(None, strict=True, description="cut texts that are too long; null: as the server is set, which is true")
    truncation_direction: Direction = Field("right", description="the end that is cut", validate_default=True)
    prompt_name: str | None = Field(None, description="the checkpoint's prompt of that name, put before each text")


class EmbedRequest(Reading):
    """POST /embed."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": ["The river bank"]}]})

    inputs: Inputs = Field(description="a text, many, token ids of one, or of many; token ids go to the model as they are")
    normalize: bool = Field(True, strict=True, description="scale vectors to length 1")
    dimensions: int | None = Field(None, ge=1, strict=True, description="only the first so many numbers, scaled if `normalize`")


class EmbedAllRequest(Reading):
    """POST /embed_all."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": ["The river bank"]}]})

    inputs: Inputs = Field(description="a text, many, token ids of one, or of many; token ids go to the model as they are")


class SimilarityInputs(BaseModel):
    """A sentence, and those that it is compared with."""

    source_sentence: Source
    sentences: Sentences


class SimilarityRequest(BaseModel):
    """POST /similarity."""

    model_config = ConfigDict(
        extra="ignore", json_schema_extra={"examples": [{"inputs": {"source_sentence": "a river", "sentences": ["a stream", "a bank"]}}]}
    )

    # their schemas stand where they are used: a document that holds this one could not follow a reference within it
    inputs: Annotated[SimilarityInputs, WithJsonSchema(SimilarityInputs.model_json_schema())]
    parameters: Annotated[Reading | None, WithJsonSchema(Reading.model_json_schema())] = None


class TokenizeRequest(BaseModel):
    """POST /tokenize."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{"inputs": "The river bank"}]})

    inputs: Texts = Field(description="a text, or many")
    add_special_tokens: bool = Field(True, strict=True, description="with the special tokens that the model gets")
    prompt_name: str | None = Field(None, description="the checkpoint's prompt of that name, put before each text")


class DecodeRequest(BaseModel):
    """POST /decode."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{"ids": [[101, 2314, 2924, 102]]}]})

    ids: Ids = Field(description="token ids of a text, or of many")
    skip_special_tokens: bool = Field(True, strict=True, description="leave special tokens out of the text")
