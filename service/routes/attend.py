"""POST /attend: text in, tokens, vectors and attention out."""

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from models.reading import AXES, Answer, Plan, Question, QuestionError, Reduced, Reduction, plan, read, values_of, weights_of
from models.reduce import Name
from models.values import Encoding, Passage, Token, Word
from service import bertviz, errors, wire
from service.ahead import ahead
from service.answers import Results, Times, off_loop, parse, read_passages, streamed, submitted
from service.openapi import body_of
from service.schemas.attend import AttendRequest
from service.served import Served
from service.state import State, state_of

if TYPE_CHECKING:
    from models.encoder import Facts

router = APIRouter(tags=["attend"])
JSON, NDJSON, SAFETENSORS = "application/json", "application/x-ndjson", "application/x-safetensors"


@dataclass(frozen=True)
class Asked:
    """One text of a request, tokenized and planned."""

    passage: Passage
    tokens: Sequence[Token]
    words: Sequence[Word]
    plan: Plan


@router.post("/attend", summary="Tokens, contextual vectors and attention weights of texts", openapi_extra=body_of(AttendRequest))
async def attend(request: Request) -> Response:
    """Embed texts and say how their tokens attend to each other. The answer is JSON, NDJSON or safetensors, as `Accept` says."""
    state, times = state_of(request), Times()
    media = negotiate(request)
    form = request.query_params.get("format")
    if form not in (None, "bertviz"):
        raise errors.invalid(f"there is no format {form!r}; the one there is is bertviz", "format")
    if form == "bertviz" and media != JSON:
        raise errors.AttendError(406, "not_acceptable", f"the format bertviz is {JSON}; Accept must allow it", "accept")
    body = await parse(request, AttendRequest)
    if form == "bertviz":
        bertviz.check(body)
    served = state.models.get(body.model)
    question = question_of(body, served)
    passages = await read_texts(state, served, body, times)
    size = (10 + len(question.spans)) * times.tokens + sum(len(text) for p in passages for text in p.texts)
    asked = await off_loop(size, lambda: [ask(served, question, p, i, len(passages)) for i, p in enumerate(passages)])
    check_caps(state, served, asked, body, media)
    reply = Reply(state, served, body, asked, times)
    async with submitted(request, served, passages, [a.plan.probe for a in asked], state.settings.request_timeout, times) as results:
        if form == "bertviz":
            return await reply.bertviz(results)
        if media == NDJSON:
            return await reply.lines(results)
        return await (reply.tensors(results) if media == SAFETENSORS else reply.json(results))


def negotiate(request: Request) -> str:
    """Which of the three forms `Accept` allows, the most wanted first. Raises AttendError 406."""
    wanted: list[tuple[float, str]] = []
    for part in request.headers.get("accept", "*/*").split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        wanted.append((-float(quality) if quality.replace(".", "", 1).isdigit() else 0.0, kind))
    for weight, kind in sorted(wanted, key=lambda pair: pair[0]):
        if weight == 0:
            continue
        if kind in ("*/*", "application/*", JSON):
            return JSON
        if kind in (NDJSON, SAFETENSORS):
            return kind
    raise errors.AttendError(406, "not_acceptable", f"Accept must allow {JSON}, {NDJSON} or {SAFETENSORS}", "accept")


def question_of(body: AttendRequest, served: Served) -> Question:
    """The request's question with the model's numbers of layers and heads. Raises AttendError for one that does not exist."""
    facts, include = served.facts, set(body.include)
    attention = "attention" in include
    if attention and facts.path == "none":
        if "include" in body.model_fields_set:
            raise errors.invalid(f"the attention of {served.name} cannot be read: its architecture does not hand it out", "include")
        attention = False
    layers = numbers(body.layers, facts.num_layers, "layers", "layer")
    return Question(
        pooled="pooled" in include,
        embeddings="embeddings" in include,
        attention=attention,
        layers=layers,
        heads=None if body.heads == "all" else numbers(body.heads, facts.num_heads, "heads", "head"),
        combine=body.combine_heads,
        hidden_layers=()
        if body.hidden_layers is None
        else numbers(body.hidden_layers, facts.num_layers + 1, "hidden_layers", "hidden layer"),
        focus=body.focus,
        unit=body.unit,
        special_tokens=body.special_tokens,
        spans=tuple(body.spans or ()),
        reductions=tuple(reduction_of(name, number, layers, served.name, facts) for name, number in body.reduce),
    )


def reduction_of(name: Name, number: int | None, layers: tuple[int, ...], model: str, facts: "Facts") -> Reduction:
    """A reduction with the layers that it is made of. Raises AttendError for one that the model cannot give."""
    if facts.path == "none":
        raise errors.invalid(f"reduce: the attention of {model} cannot be read: its architecture does not hand it out", "reduce")
    if name == "norms" and not facts.norms:
        raise errors.invalid(f"reduce: there are no norms for {model}: the output projections of its attention were not found", "reduce")
    if name != "rollout":
        return Reduction(name, layers, number or 0)
    first = min(layers) if number is None else numbers([number], facts.num_layers, "reduce", "layer")[0]
    return Reduction(name, tuple(range(first, facts.num_layers)))


def numbers(chosen: str | list[int], count: int, field: str, what: str) -> tuple[int, ...]:
    """Numbers from 0 for "all", "last" or a list; negative ones count from the end, except for heads."""
    if chosen == "all":
        return tuple(range(count))
    if chosen == "last":
        return (count - 1,)
    out: list[int] = []
    for number in chosen:
        assert isinstance(number, int)
        if not (0 if what == "head" else -count) <= number < count:
            raise errors.invalid(f"{field}: {what} {number} does not exist; the model has {count} {what}s, 0 to {count - 1}", field)
        out.append(number % count)
    if len(set(out)) < len(out):
        raise errors.invalid(f"{field}: a {what} is named twice", field)
    return tuple(out)


async def read_texts(state: State, served: Served, body: AttendRequest, times: Times) -> list[Passage]:
    """The request's passages; a text that cannot be read is named by its place."""
    if len(body.text) > state.settings.max_request_texts:
        raise errors.too_many(f"the request has {len(body.text)} texts; the limit is {state.settings.max_request_texts}: split it", "text")
    return await read_passages(served, state.metrics, times, body.text, "text", truncate=body.truncate)


def ask(served: Served, question: Question, passage: Passage, number: int, count: int) -> Asked:
    """Put the question to a text. Raises AttendError that says which text does not have what the question names."""
    tokens, words = served.reader.annotate(passage)
    try:
        return Asked(passage, tokens, words, plan(question, passage, tokens, words))
    except QuestionError as error:
        where = f"text {number}: " if count > 1 else ""
        raise errors.invalid(f"{error.field}: {where}{error}", error.field) from error


def check_caps(state: State, served: Served, asked: Sequence[Asked], body: AttendRequest, media: str) -> None:
    """Refuse what would be too large, before any of it is computed. Raises AttendError 413."""
    facts, settings = served.facts, state.settings
    weights = sum(weights_of(a.plan, a.passage, facts.num_heads) for a in asked)
    if weights > settings.max_attention_values:
        raise errors.answer_too_large(
            f"{weights} attention weights are asked for; the limit is {settings.max_attention_values}: "
            "narrow layers, heads, focus or the number of texts",
            "layers",
        )
    numbers = sum(values_of(a.plan, facts.num_heads) + vectors_of(a, facts.dim, facts.d_model) for a in asked)
    digits = 4.0 if media == SAFETENSORS else 16 / 3 if body.encoding_format == "base64" else 4.0 + (body.decimals or 9)
    size = int(numbers * digits) + 120 * sum(len(a.tokens) for a in asked)
    if size > settings.max_answer_bytes:
        raise errors.answer_too_large(
            f"the answer would have about {size} bytes; the limit is {settings.max_answer_bytes}: "
            "narrow include, layers, heads, focus or the number of texts, or ask for application/x-safetensors",
            "include",
        )


def vectors_of(asked: Asked, dim: int, d_model: int) -> int:
    """How many numbers the vectors in the answer to one text have."""
    probe, length = asked.plan.probe, len(asked.passage)
    rows = len(asked.plan.queries) if probe.embeddings else 0
    return dim * (probe.pooled + len(probe.spans)) + d_model * (rows + len(probe.hidden_layers) * length)


class Reply:
    """Turns the results of one request into its answer."""

    def __init__(self, state: State, served: Served, body: AttendRequest, asked: Sequence[Asked], times: Times) -> None:
        self.state, self.served, self.body, self.asked, self.times = state, served, body, asked, times

    # ── Forms ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def json(self, results: Results) -> Response:
        """One JSON document, written text by text: what has been written is let go."""
        encodings = await results.all()
        size = sum(array.size for e in encodings for array in vars(e).values() if array is not None)

        def made() -> Iterator[Any]:
            for i in range(len(encodings)):
                encoding, encodings[i] = encodings[i], None  # type: ignore[call-overload]
                yield self.result(i, encoding, self.number)

        document = {"model": self.served.name, "results": wire.LazyList(made()), "usage": self.usage()}
        return await self.send(size, lambda: wire.json_document(document, self.body.decimals), JSON)

    async def tensors(self, results: Results) -> Response:
        """One safetensors file; everything that is no tensor is JSON in its metadata."""
        encodings = await results.all()
        tensors: dict[str, Any] = {}

        def note(i: int, name: str, array: Any) -> Any:
            tensors[f"{i}.{name}"] = array

        def made() -> tuple[int, Iterator[bytes]]:
            described = [self.result(i, encoding, partial(note, i)) for i, encoding in enumerate(encodings)]
            head = {"model": self.served.name, "results": described, "usage": self.usage()}
            return wire.safetensors_chunks(tensors, {"attend": orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY).decode()})

        length, chunks = await off_loop(1_000_000, made)
        return streamed(self.state, self.served, chunks, SAFETENSORS, {**self.times.headers(), "content-length": str(length)})

    async def lines(self, results: Results) -> Response:
        """One result a line as soon as it is there, the last line with model and usage; the first must be there to begin."""
        first = await results.get(0)
        results.keep_open()

        async def chunks() -> AsyncIterator[bytes]:
            try:
                for i in range(len(self.asked)):
                    encoding = first if i == 0 else await results.get(i)
                    async for chunk in ahead(self.result_line(i, encoding)):
                        yield chunk
                yield self.line({"model": self.served.name, "usage": self.usage()})
            except errors.AttendError as error:
                yield self.line(errors.render(error, "attend")[1])
            finally:
                results.close()

        return StreamingResponse(chunks(), media_type=NDJSON, headers=self.times.headers())

    async def bertviz(self, results: Results) -> Response:
        """What bertviz's views read: `{"attention": [{"name", "attn", "left_text", "right_text"}]}` for each text."""
        encodings = await results.all()

        def encode() -> Iterator[bytes]:
            views = [bertviz.view(self.answer(i, encoding), self.asked[i]) for i, encoding in enumerate(encodings)]
            yield from wire.json_document(views[0] if len(views) == 1 else views, self.body.decimals)

        return await self.send(1_000_000, encode, JSON)

    async def send(self, size: int, encode: Callable[[], Iterator[bytes]], media: str) -> Response:
        """A small answer in one piece, a large one chunk by chunk, encoded off the event loop."""
        headers = self.times.headers()
        if size > 4096:
            return streamed(self.state, self.served, encode(), media, headers)
        with self.state.metrics.stage(self.served.name, "encode"):
            return Response(b"".join(encode()), media_type=media, headers=headers)

    # ── Content ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def number(self, name: str, array: Any) -> Any:
        """How an array is written in JSON."""
        return wire.Base64(array) if self.body.encoding_format == "base64" else array

    def result_line(self, i: int, encoding: Encoding) -> Generator[bytes]:
        """The line of text i, in chunks."""
        yield from wire.json_document(self.result(i, encoding, self.number), self.body.decimals, end=b"\n")

    def line(self, value: Any) -> bytes:
        """One short line of NDJSON."""
        return b"".join(wire.json_document(value, self.body.decimals, end=b"\n"))

    def usage(self) -> dict[str, int]:
        """How much was computed."""
        return {"texts": len(self.asked), "tokens": self.times.tokens}

    def answer(self, i: int, encoding: Encoding) -> Answer:
        """The arrays of text i, counted as handed out."""
        answer = read(self.asked[i].plan, encoding)
        if answer.weights is not None:
            self.state.metrics.attention_values.labels(self.served.name).inc(answer.weights.size)
        return answer

    def result(self, i: int, encoding: Encoding, put: Callable[[str, Any], Any]) -> dict[str, Any]:
        """The answer to text i as the contract lays it out; `put` says what stands in an array's place."""
        asked, answer = self.asked[i], self.answer(i, encoding)
        plan = asked.plan
        out: dict[str, Any] = {
            "tokens": asked.tokens,
            "words": words_of(asked),
            "truncated": asked.passage.truncated,
        }
        if answer.pooled is not None:
            out["pooled"] = put("pooled", answer.pooled)
        if answer.embeddings is not None:
            out["embeddings"] = put("embeddings", answer.embeddings)
        if answer.hidden_states is not None:
            layers = list(plan.probe.hidden_layers)
            out["hidden_states"] = {
                "axes": ["layer", "token", "dim"],
                "layers": layers,
                "values": put("hidden_states", answer.hidden_states),
            }
        if answer.weights is not None:
            named = self.axes(plan, ("layer", "head", "query", "key"), plan.question.layers)
            out["attention"] = {**named, "weights": put("attention", answer.weights)}
        if answer.reductions:
            out["reductions"] = {reduced.reduction.name: self.reduction(plan, reduced, put) for reduced in answer.reductions}
        if answer.spans is not None:
            out["spans"] = [
                {**span_of(asked.tokens, first, last), "tokens": [first, last], "vector": put(f"spans.{k}", vector)}
                for k, ((first, last), vector) in enumerate(zip(plan.probe.spans, answer.spans, strict=True))
            ]
        return out

    def axes(self, plan: Plan, axes: Sequence[str], layers: Sequence[int], combined: bool = True) -> dict[str, Any]:
        """What the axes of an array stand for; layers and heads are named even where the array has no axis for them."""
        question = plan.question
        heads: list[Any] = list(range(self.served.facts.num_heads)) if question.heads is None else list(question.heads)
        if combined and question.combine is not None:
            heads = [question.combine]
        named: dict[str, Any] = {"axes": list(axes), "layers": list(layers), "heads": heads}
        if "query" in axes:
            named["queries"] = list(plan.queries)
        if "key" in axes:
            named["keys"] = list(plan.keys)
        return named

    def reduction(self, plan: Plan, reduced: Reduced, put: Callable[[str, Any], Any]) -> dict[str, Any]:
        """A reduction as docs/attention.md lays it out."""
        name, layers = reduced.reduction.name, reduced.reduction.layers
        named = self.axes(plan, AXES[name], layers, combined=name != "rollout")
        if name == "kind":
            figures = {what: put(f"reductions.kind.{what}", figure) for what, figure in reduced.more.items()}
            return {**named, "values": reduced.values.tolist(), "figures": figures}
        return {**named, **reduced.more, "values": put(f"reductions.{name}", reduced.values)}


def words_of(asked: Asked) -> list[Any]:
    """The words; with `unit: "word"`, special tokens that are kept stand after them, so that the attention's indexes reach them."""
    words: list[Any] = list(asked.words)
    if asked.plan.question.unit == "word" and asked.plan.question.special_tokens == "keep":
        outside = [token for token in asked.tokens if token.word is None]
        words += [{"text": t.text, "start": None, "end": None, "segment": t.segment, "special": True} for t in outside]
    return words


def span_of(tokens: Sequence[Token], first: int, last: int) -> dict[str, int | None]:
    """Where the tokens first to last stand in the text."""
    inside = [token for token in tokens[first : last + 1] if token.start is not None]
    return {"start": inside[0].start if inside else None, "end": inside[-1].end if inside else None}
