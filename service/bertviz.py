"""The shape that bertviz's head view and model view read, so that an answer can be put into them as it is."""

from collections.abc import Sequence
from typing import Any, Protocol

from models.reading import Answer, Plan
from models.values import Token, Word
from service.errors import invalid
from service.schemas.attend import AttendRequest


class Read(Protocol):
    """What is shown: the tokens and words of a text, and which of them the attention's axes stand for."""

    @property
    def tokens(self) -> Sequence[Token]: ...
    @property
    def words(self) -> Sequence[Word]: ...
    @property
    def plan(self) -> Plan: ...


def check(body: AttendRequest) -> None:
    """Raises AttendError when a request asks for more or less than bertviz shows: the attention, as numbers."""
    if "attention" not in body.include:
        raise invalid("include: bertviz shows attention; include must have it", "include")
    if body.encoding_format != "float":
        raise invalid("encoding_format: bertviz reads numbers; encoding_format must be float", "encoding_format")
    if body.reduce:
        raise invalid("reduce: bertviz shows attention alone; leave reduce out", "reduce")


def view(answer: Answer, read: Read) -> dict[str, Any]:
    """`attn` is [layer][head][left][right]; left are the queries, right the keys.

    Raises AttendError when the attention of the model cannot be read.
    """
    if answer.weights is None:
        raise invalid("include: bertviz shows attention, and that of this model cannot be read", "include")
    question = read.plan.question
    texts = [token.text for token in read.tokens]
    if question.unit == "word":
        texts = [word.text for word in read.words] + [token.text for token in read.tokens if token.word is None]
    left, right = [texts[i] for i in read.plan.queries], [texts[i] for i in read.plan.keys]
    count = answer.weights.shape[1]
    heads = list(range(count)) if question.heads is None or question.combine else list(question.heads)
    return {
        "attention": [{"name": None, "attn": answer.weights, "left_text": left, "right_text": right}],
        "default_filter": "0", "include_layers": list(question.layers), "include_heads": heads,
        "total_heads": max(heads) + 1, "display_mode": "dark", "layer": None, "heads": None,
    }  # fmt: skip
