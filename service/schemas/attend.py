"""The body of POST /attend."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from models.reading import AXES, Place, Target
from models.reduce import Name
from service.schemas.checks import kind_of, wrong
from service.schemas.checks import text as text_of

Item = tuple[str, ...]
"""A text, or a pair of texts."""


def _items(value: Any) -> list[Item]:
    """One text, many, or pairs → a list of items."""
    if isinstance(value, str):
        return [(text_of(value, "the text"),)]
    if not isinstance(value, list):
        raise wrong(f"must be a string or an array of strings and pairs of strings, not {kind_of(value)}")
    if not value:
        raise wrong("the array is empty")
    items: list[Item] = []
    for i, item in enumerate(value):
        if isinstance(item, list):
            if len(item) != 2:
                raise wrong(f"item {i} is an array of {len(item)}; a pair has 2 strings")
            items.append((text_of(item[0], f"item {i}, first text,"), text_of(item[1], f"item {i}, second text,")))
        else:
            items.append((text_of(item, f"item {i}"),))
    return items


def _integers(value: Any, what: str) -> list[int]:
    for i, number in enumerate(value):
        if isinstance(number, bool) or not isinstance(number, int):
            raise wrong(f"item {i} must be the number of a {what}, not {kind_of(number)}")
    return list(value)


def _chosen(what: str, words: tuple[str, ...], null: bool = False) -> Any:
    """A validator for a word of `words`, or an array of integers."""

    def check(value: Any) -> Any:
        if (value is None and null) or value in [*words]:
            return value
        if isinstance(value, list) and value:
            return _integers(value, what)
        said = f"{value!r}" if isinstance(value, str) else "an empty array" if value == [] else kind_of(value)
        raise wrong(f"must be {' or '.join(map(repr, words))} or an array of {what} numbers, not {said}")

    return BeforeValidator(check)


def _target(value: Any) -> Target:
    """What `focus` takes → a place or token indexes."""
    if isinstance(value, str):
        return Place(text=text_of(value, "the string"))
    if isinstance(value, list):
        if not value:
            raise wrong("the array of token indexes is empty")
        return tuple(_integers(value, "token"))
    if not isinstance(value, dict):
        raise wrong(f"must be a string, an object or an array of token indexes, not {kind_of(value)}")
    numbers = {key: value[key] for key in ("occurrence", "start", "end", "segment") if key in value}
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise wrong(f"{key} must be a number from 0, not {number!r}")
    segment = numbers.get("segment")
    if set(value) <= {"text", "occurrence", "segment"} and "text" in value:
        return Place(text=text_of(value["text"], "its text"), occurrence=numbers.get("occurrence", 0), segment=segment)
    if set(value) <= {"start", "end", "segment"} and {"start", "end"} <= set(value):
        return Place(start=numbers["start"], end=numbers["end"], segment=segment)
    raise wrong('an object is {"start", "end"} or {"text", "occurrence"}, and may have "segment"')


def _focus(value: Any) -> Target | None:
    return None if value is None else _target(value)


def _spans(value: Any) -> list[Target] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise wrong(f"must be an array with at least one span, not {'an empty one' if value == [] else kind_of(value)}")
    return [_target(span) for span in value]


def _reduce(value: Any) -> list[tuple[Name, int | None]]:
    """Names, {"top_k": k} and {"rollout": layer} → names with their number."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(f"must be an array of reductions, not {kind_of(value)}")
    found: dict[Name, int | None] = {}
    for i, item in enumerate(value):
        name, number = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (item, None)
        if not isinstance(name, str) or name not in AXES:
            said = repr(name) if isinstance(name, str) else kind_of(item)
            raise wrong(f'item {i} must be one of {", ".join(AXES)}, {{"top_k": k}} or {{"rollout": layer}}, not {said}')
        if name == "top_k" and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise wrong(f'item {i}: top_k takes a number from 1: {{"top_k": 5}}')
        if isinstance(item, dict) and (name not in ("top_k", "rollout") or isinstance(number, bool) or not isinstance(number, int)):
            raise wrong(f"item {i}: {name} takes {'the number of a layer' if name == 'rollout' else 'no number'}")
        if name in found:
            raise wrong(f"item {i}: {name} is named twice")
        found[name] = number
    return list(found.items())


_TEXT = {"type": "string", "minLength": 1}
_SEGMENT = {"type": "integer", "minimum": 0, "maximum": 1}
_INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TARGET = {
    "oneOf": [
        {**_TEXT, "description": "a string that occurs in the text; whole words are found first"},
        {"type": "object", "required": ["start", "end"], "additionalProperties": False, "description": "code points, end exclusive",
         "properties": {"start": {"type": "integer", "minimum": 0}, "end": {"type": "integer", "minimum": 1},
                        "segment": _SEGMENT}},
        {"type": "object", "required": ["text"], "additionalProperties": False, "description": "a later occurrence, counted from 0",
         "properties": {"text": _TEXT, "occurrence": {"type": "integer", "minimum": 0}, "segment": _SEGMENT}},
        {**_INTEGERS, "description": "token indexes"},
    ]
}  # fmt: skip

Texts = Annotated[
    list[Item],
    BeforeValidator(_items),
    WithJsonSchema(
        {
            "oneOf": [
                _TEXT,
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 2}]},
                },
            ]
        }
    ),
]
Focus = Annotated[Any, BeforeValidator(_focus), WithJsonSchema({"oneOf": [*_TARGET["oneOf"], {"type": "null"}]})]
Spans = Annotated[
    Any, BeforeValidator(_spans), WithJsonSchema({"oneOf": [{"type": "array", "items": _TARGET, "minItems": 1}, {"type": "null"}]})
]
_REDUCTION = {
    "oneOf": [
        {"enum": [name for name in AXES if name != "top_k"]},
        {"type": "object", "additionalProperties": False, "required": ["top_k"],
         "properties": {"top_k": {"type": "integer", "minimum": 1}}},
        {"type": "object", "additionalProperties": False, "required": ["rollout"], "properties": {"rollout": {"type": "integer"}}},
    ]
}  # fmt: skip
Reduce = Annotated[Any, BeforeValidator(_reduce), WithJsonSchema({"oneOf": [{"type": "array", "items": _REDUCTION}, {"type": "null"}]})]


def _numbers(*words: str, null: bool = False) -> WithJsonSchema:
    choices: list[dict[str, Any]] = [{"enum": list(words)}, _INTEGERS]
    return WithJsonSchema({"oneOf": [*choices, {"type": "null"}] if null else choices})


Layers = Annotated[Any, _chosen("layer", ("last", "all")), _numbers("last", "all")]
Heads = Annotated[Any, _chosen("head", ("all",)), _numbers("all")]
HiddenLayers = Annotated[Any, _chosen("layer", ("all",), null=True), _numbers("all", null=True)]
Part = Literal["pooled", "embeddings", "attention"]


class AttendRequest(BaseModel):
    """What to say about which texts."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"text": "Tom is going to fish at the river bank", "focus": "bank", "layers": "all", "combine_heads": "mean"}]
        },
    )

    text: Texts = Field(description="a text, or an array of texts and pairs of texts")
    model: str | None = Field(None, description="which model; the first one served unless given")
    include: list[Part] = Field(["pooled", "embeddings", "attention"], description="what to return; tokens always come along")
    layers: Layers = Field("last", description="layers whose attention is returned, from 0; negative: from the end")
    heads: Heads = Field("all", description="heads whose attention is returned, from 0")
    combine_heads: Literal["mean", "max"] | None = Field(None, description="one map for each layer instead of one for each head")
    hidden_layers: HiddenLayers = Field(None, description="hidden states to return as well; 0 is what enters the first layer")
    focus: Focus = Field(None, description="only these tokens as rows (queries) of attention and embeddings")
    unit: Literal["token", "word"] = Field("token", description="word: the pieces of each word put together")
    special_tokens: Literal["keep", "drop"] = Field("keep", description="drop: without special tokens, rows scaled to sum to 1 again")
    spans: Spans = Field(None, description="a vector in context for each of these spans")
    reduce: Reduce = Field([], description="figures computed from the attention, beside the weights or instead (include)")
    truncate: bool = Field(False, description="cut texts that are too long; false: refuse them")
    encoding_format: Literal["float", "base64"] = Field("float", description='base64: {"shape", "dtype": "float32", "data"}, little-endian')
    decimals: int | None = Field(6, ge=1, le=9, description="digits after the point of numbers; null: shortest exact")
