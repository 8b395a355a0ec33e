"""Checks that several dialects share, with messages in the caller's words."""

from typing import Any

from pydantic_core import PydanticCustomError


def wrong(message: str, kind: str = "attend") -> PydanticCustomError:
    """What pydantic reports as this field's fault; `kind` "empty" is for text that must not be."""
    return PydanticCustomError(kind, "{message}", {"message": message})


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    names = {"NoneType": "null", "str": "a string", "bool": "a boolean", "int": "a number", "float": "a number", "list": "an array",
             "dict": "an object"}  # fmt: skip
    return names.get(type(value).__name__, type(value).__name__)


def text(value: Any, where: str) -> str:
    """A string that has something in it, all of it characters."""
    if not isinstance(value, str):
        raise wrong(f"{where} must be a string, not {kind_of(value)}")
    if not value:
        raise wrong(f"{where} is empty", "empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise wrong(f"{where} holds half of a surrogate pair, which is no character")
    return value


def is_ids(value: Any) -> bool:
    """Whether a value is an array of numbers, as token ids are."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def inputs(value: Any) -> list[str | list[int]]:
    """One text, many, token ids of one, or of many → a list of texts and token ids."""
    if isinstance(value, str):
        return [text(value, "the text")]
    if is_ids(value):
        return [list(value)]
    if not isinstance(value, list):
        raise wrong(f"must be a string, an array of strings, or arrays of token ids, not {kind_of(value)}")
    if not value:
        raise wrong("the array is empty", "empty")
    return [list(item) if is_ids(item) else text(item, f"item {i}") for i, item in enumerate(value)]


def texts(value: Any) -> list[str]:
    """One text, or many → a list of texts."""
    if isinstance(value, str):
        return [text(value, "the text")]
    if not isinstance(value, list):
        raise wrong(f"must be a string or an array of strings, not {kind_of(value)}")
    if not value:
        raise wrong("the array is empty", "empty")
    return [text(item, f"item {i}") for i, item in enumerate(value)]


TEXT_SCHEMA = {"type": "string", "minLength": 1}
IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TEXTS_SCHEMA = {"oneOf": [TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA, "minItems": 1}]}
INPUTS_SCHEMA = {"oneOf": [*TEXTS_SCHEMA["oneOf"], IDS_SCHEMA, {"type": "array", "items": IDS_SCHEMA, "minItems": 1}]}
