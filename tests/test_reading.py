"""Focus, words and special tokens: the same words whatever the tokenizer, the right rows and columns, and no more computed than that."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from models.bridge import Recording
from models.checkpoint import DEFAULT_MODEL, locate
from models.passages import UNIT, Reader
from models.reading import Place, Plan, Question, QuestionError, Reduction, plan, read, values_of, weights_of
from models.values import Encoding, Passage, Token, Word

LAYERS, HEADS = 3, 4
SENTENCES = [
    "Tom is going to fish at the river bank, isn't he?",
    "Don't re-read the well-known reader's unbelievable story: it isn't new.",
    "The bank (on Main Street) lends money to fishermen who can't pay.",
    "naïve cafés, 3.14 and 10,000 numbers; a state-of-the-art river",
]


def _word_piece() -> Tokenizer:
    """The default model's own."""
    tokenizer = Tokenizer.from_file(str(locate(DEFAULT_MODEL)[2] / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _byte_level() -> Tokenizer:
    """As RoBERTa's and GPT-2's: BPE over bytes, a word's space belongs to its first token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    return tokenizer


def _unigram() -> Tokenizer:
    """As XLM-RoBERTa's: pieces with ▁ for the space before them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", [("<s>", 0), ("</s>", 1)])
    return tokenizer


READERS = {"WordPiece": Reader(_word_piece(), None), "byte-level BPE": Reader(_byte_level(), None), "Unigram": Reader(_unigram(), None)}
every_tokenizer = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
PIECES = [
    "Tom",
    "don't",
    "re-read",
    "isn't",
    "river",
    "bank.",
    "(money)",
    "naïve",
    "3.14",
    "unbelievable",
    "—",
    "“quoted”",
    "state-of-the-art",
]
OTHERS = [*PIECES, "银行", "東京タワー", "👩‍👩‍👧", "🏳️‍🌈", "e\u0301", "ﬁne", "שלום", "\u200b", "½", "ＷＩＤＥ"]
SPACES = st.sampled_from([" ", "  ", "\n", "\t "])


@st.composite
def texts(draw, pieces=OTHERS, glue=SPACES):
    """Words and what stands between them."""
    chosen = draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=7))
    return "".join(piece + draw(glue) for piece in chosen)


def annotated(reader: Reader, *item: str) -> tuple[Passage, list[Token], list[Word]]:
    (passage,) = reader.read([item])
    return (passage, *reader.annotate(passage))


# ── Words ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_tokenizer
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't re-read it.", ["Don't", "re-read", "it."]),
        ("  spaces \t all\naround ", ["spaces", "all", "around"]),
        ("the (river) bank, “isn't” it?", ["the", "(river)", "bank,", "“isn't”", "it?"]),
        ("state-of-the-art 3.14 10,000", ["state-of-the-art", "3.14", "10,000"]),
        ("unbelievable", ["unbelievable"]),
    ],
)
def test_words(reader, text, words):
    _, tokens, found = annotated(reader, text)
    assert [word.text for word in found] == words
    assert [token.word for token in tokens if token.special] == [None, None]
    assert sorted({token.word for token in tokens if not token.special}) == list(range(len(words)))


def test_chinese_and_emoji():
    _, tokens, words = annotated(READERS["WordPiece"], "银行在河边 ok")
    assert [word.text for word in words] == ["银", "行", "在", "河", "边", "ok"]
    for reader in READERS.values():
        _, tokens, words = annotated(reader, "a 👩‍👩‍👧‍👦 family")
        assert [word.text for word in words] == ["a", "👩‍👩‍👧‍👦", "family"]
        assert {token.word for token in tokens if token.start is not None and 2 <= token.start < 9} == {1}


def test_a_token_that_covers_several_characters_makes_them_one_word():
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "银行": 1, "在": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("银行", "isolated")
    _, tokens, words = annotated(Reader(tokenizer, None), "银行在")
    assert [word.text for word in words] == ["银行", "在"]
    assert [token.word for token in tokens] == [0, 1]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(texts(PIECES))
@example("don't  re-read\nit's ")
def test_every_tokenizer_has_the_same_words(text):
    found = [annotated(reader, text) for reader in READERS.values()]
    assert [words for _, _, words in found] == [found[0][2]] * 3
    assert [word.text for word in found[0][2]] == text.split()
    for _, tokens, words in found:
        for token in tokens:
            if token.word is not None and text[token.start : token.end].strip():  # one of white space belongs to the word after it
                assert words[token.word].start <= token.start < token.end <= words[token.word].end


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(texts(glue=st.sampled_from(["", " "])))
def test_words_are_runs_of_units(text):
    """Whatever the text: words stand in order, do not overlap, and begin and end where units do."""
    units = [match.span() for match in UNIT.finditer(text)]
    for reader in READERS.values():
        _, tokens, words = annotated(reader, text)
        for one, other in itertools.pairwise(words):
            assert one.end <= other.start
        for word in words:
            assert word.text == text[word.start : word.end]
            assert word.start in {start for start, _ in units}
            assert word.end in {end for _, end in units}
        numbers = [token.word for token in tokens if token.word is not None]
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(len(words)))


@every_tokenizer
def test_words_of_pairs(reader):
    _, tokens, words = annotated(reader, "The bank isn't", "isn't it")
    assert [(word.text, word.segment) for word in words] == [("The", 0), ("bank", 0), ("isn't", 0), ("isn't", 1), ("it", 1)]
    assert all(words[token.word].segment == token.segment for token in tokens if token.word is not None)


# ── Rows and columns ─────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(made: Plan, count: int, seed: int = 0) -> tuple[Encoding, np.ndarray]:
    """What a model with random attention would keep for a plan, and all of that attention [layer, head, token, token]."""
    full = np.random.default_rng(seed).dirichlet(np.full(count, 0.3), (LAYERS, HEADS, count)).astype(np.float32)
    probe = made.probe
    recording = Recording(probe, HEADS, count)
    for layer in probe.layers:
        recording.keep_rows_of(layer, torch.from_numpy(full[layer]))
    vectors = np.arange(count * 2, dtype=np.float32).reshape(count, 2)
    rows = vectors if probe.rows is None else vectors[list(probe.rows)]
    return Encoding(weights=recording.weights.numpy() if probe.layers else None, embeddings=rows if probe.embeddings else None), full


def definition(question: Question, tokens: list[Token], full: np.ndarray) -> np.ndarray:
    """All rows and columns: drop and scale, combine heads, sum columns, average rows; one number at a time."""
    a = full[list(question.layers)].astype(np.float64)
    if question.heads is not None:
        a = a[:, list(question.heads)]
    if question.special_tokens == "drop":
        for i, token in enumerate(tokens):
            if token.special:
                a[..., i] = 0
        a = a / a.sum(-1, keepdims=True)
    if question.combine is not None:
        a = a.mean(1, keepdims=True) if question.combine == "mean" else a.max(1, keepdims=True)
    kept = [i for i, token in enumerate(tokens) if question.special_tokens == "keep" or not token.special]
    groups = [[i] for i in kept]
    if question.unit == "word":
        words = sorted({tokens[i].word for i in kept if tokens[i].word is not None})
        groups = [[i for i in kept if tokens[i].word == w] for w in words] + [[i] for i in kept if tokens[i].word is None]
    out = np.zeros((*a.shape[:2], len(groups), len(groups)))
    for (q, row), (k, column) in itertools.product(enumerate(groups), enumerate(groups)):
        out[:, :, q, k] = sum(a[:, :, i, j] for i in row for j in column) / len(row)
    return out


questions = st.builds(
    Question,
    layers=st.sampled_from([(0, 1, 2), (2,), (2, 0)]),
    heads=st.sampled_from([None, (3, 1)]),
    combine=st.sampled_from([None, "mean", "max"]),
    unit=st.sampled_from(["token", "word"]),
    special_tokens=st.sampled_from(["keep", "drop"]),
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(texts(PIECES), questions, st.sampled_from(sorted(READERS)), st.data())
def test_weights_are_their_definition(text, question, name, data):
    passage, tokens, words = annotated(READERS[name], text)
    made = plan(question, passage, tokens, words)
    encoding, full = encode(made, len(tokens))
    weights, expected = read(made, encoding).weights, definition(question, tokens, full)
    assert weights == pytest.approx(expected, abs=1e-6)
    if question.combine != "max":
        assert weights.sum(-1) == pytest.approx(np.ones(weights.shape[:-1]), abs=1e-5)
    index = data.draw(st.sampled_from([i for i, token in enumerate(tokens) if not token.special]))
    narrowed = plan(Question(**{**vars(question), "focus": (index,)}), passage, tokens, words)
    encoding, _ = encode(narrowed, len(tokens))
    (query,) = narrowed.queries
    row = made.queries.index(query)
    assert query == (index if question.unit == "token" else tokens[index].word)
    assert narrowed.keys == made.keys
    assert read(narrowed, encoding).weights == pytest.approx(weights[:, :, row : row + 1], abs=1e-6)
    assert read(narrowed, encoding).embeddings.shape == (1, 2)


def test_merged_by_hand():
    """Tokens a, b1, b2: columns b1 + b2, rows b1 and b2 averaged."""
    tokens = [Token(0, "a", 0, 1, 0, 0, False), Token(1, "b", 2, 3, 1, 0, False), Token(2, "##b", 3, 4, 1, 0, False)]
    words = [Word("a", 0, 1, 0), Word("bb", 2, 4, 0)]
    passage = Passage(("a bb",), [0, 1, 2], [0] * 3, [(0, 1), (2, 3), (3, 4)], [0] * 3, [False] * 3)
    made = plan(Question(layers=(0,), unit="word"), passage, tokens, words)
    weights = np.array([[[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]]]], dtype=np.float32)
    answer = read(made, Encoding(weights=weights, embeddings=np.array([[1.0], [2.0], [4.0]], dtype=np.float32)))
    assert answer.weights == pytest.approx(np.array([[[[0.5, 0.5], [0.4, 0.6]]]]))
    assert answer.embeddings == pytest.approx(np.array([[1.0], [3.0]]))


def test_special_tokens_come_after_the_words():
    passage, tokens, words = annotated(READERS["WordPiece"], "unbelievable banks")
    made = plan(Question(layers=(0,), unit="word"), passage, tokens, words)
    assert made.queries == made.keys == (0, 1, 2, 3)
    assert made.columns[2:] == ((0,), (len(tokens) - 1,))
    assert made.special == (False, False, True, True)


# ── Focus ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def focused(text: str, focus: Place | tuple[int, ...], **more: object) -> list[str]:
    passage, tokens, words = annotated(READERS["WordPiece"], *([text] if isinstance(text, str) else text))
    made = plan(Question(layers=(0,), focus=focus, **more), passage, tokens, words)
    return [tokens[i].text if made.question.unit == "token" else words[i].text for i in made.queries]


def places(text: str, needle: str, count: int) -> list[int]:
    """Where the occurrences 0, 1 … are found, as the start of their first token."""
    passage, tokens, words = annotated(READERS["WordPiece"], text)
    found = [plan(Question(layers=(0,), focus=Place(needle, k)), passage, tokens, words).queries[0] for k in range(count)]
    return [tokens[i].start for i in found]


def test_focus():
    assert focused("The riverbank, the bank.", Place("bank")) == ["bank"]
    assert focused("the river bank", Place("river bank")) == ["river", "bank"]
    assert focused("an unbelievable bank", Place("believ"), unit="word") == ["unbelievable"]
    assert focused("a bank. b", Place("bank"), unit="word") == ["bank."]
    assert focused("银行在河边", Place("河")) == ["河"]
    assert focused("naïve café", Place("café")) == ["cafe"]
    assert focused("the river bank", Place(start=4, end=9)) == ["river"]
    assert focused("the river bank", Place(start=5, end=11)) == ["river", "bank"]
    assert focused("the river bank", (3, 1, 3)) == ["the", "bank"]
    assert focused("one (a) two", Place("(a)")) == ["(", "a", ")"]
    assert focused(("a bank", "the bank is"), Place("bank", segment=1)) == ["bank"]
    assert focused(("a bank", "the river"), Place("river")) == ["river"]


def test_whole_words_are_found_first_and_occurrences_count_from_0():
    text = "bankers bank on banks, bank"
    assert places(text, "bank", 4) == [8, 23, 0, 16]
    assert places("It's its, isn't it", "it", 1) == [16]
    assert focused("a rebanking", Place("bank"), unit="word") == ["rebanking"]


@pytest.mark.parametrize(
    ("focus", "said"),
    [
        (Place("office"), "'office' does not occur"), (Place("bank", 2), "'bank' occurs 2 times"), (Place(" "), "empty"),
        (Place("bank", segment=1), "'bank' does not occur"), (Place(start=3, end=99), "15 characters"), (Place(start=3, end=3), "3"),
        (Place(start=0, end=1, segment=1), "segment 1"), ((9,), "token 9"), ((-1,), "token -1"),
    ],
)  # fmt: skip
def test_focus_that_is_not_there(focus, said):
    with pytest.raises(QuestionError, match=re.escape(said)) as caught:
        focused("the bank a bank", focus)
    assert caught.value.field == "focus"


def test_focus_on_what_was_cut_off_or_dropped():
    reader = Reader(READERS["WordPiece"].tokenizer, 6)
    (passage,) = reader.read([("one two three four five six",)], truncate=True)
    with pytest.raises(QuestionError, match="cut off"):
        plan(Question(layers=(0,), focus=Place("six")), passage, *reader.annotate(passage))
    with pytest.raises(QuestionError, match="special tokens only"):
        focused("bank", (0,), special_tokens="drop")


def test_many_occurrences_are_found_fast():
    """A text may be as long as a body; looking through it must not take the square of that."""
    reader = Reader(READERS["WordPiece"].tokenizer, 16)
    (passage,) = reader.read([("a" * 100_000 + " a" * 100_000,)], truncate=True)
    with pytest.raises(QuestionError, match="occurs 200000 times"):
        plan(Question(layers=(0,), focus=Place("a", 200_000)), passage, *reader.annotate(passage))


# ── No more than asked ───────────────────────────────────────────────────────────────────────────────────────────────────


def planned(text: str = "the unbelievable river bank", **fields: object) -> tuple[Plan, Passage]:
    passage, tokens, words = annotated(READERS["WordPiece"], text)
    return plan(Question(**fields), passage, tokens, words), passage


def reductions(*names: str, layers: tuple[int, ...] = (2,), first: int = 0) -> tuple[Reduction, ...]:
    return tuple(Reduction(name, tuple(range(first, LAYERS)) if name == "rollout" else layers, k=3) for name in names)


def test_only_what_is_asked_is_computed():
    made, _ = planned(layers=(2,), attention=False, focus=Place("bank"), reductions=reductions("top_k"))
    assert made.probe.queries == made.probe.rows == (len(made.keys) - 2,)
    assert made.probe.layers == (2,)
    made, _ = planned(layers=(2,), attention=False, focus=Place("bank"), reductions=reductions("rollout"))
    assert made.probe.queries is None
    assert len(made.probe.rows) == 1
    assert made.probe.layers == (0, 1, 2)
    assert made.probe.combine == "mean"
    assert made.probe.norms is False
    made, _ = planned(layers=(2,), attention=False, reductions=reductions("rollout", first=1), special_tokens="drop")
    assert made.probe.layers == (1, 2)
    assert made.probe.queries == made.probe.keys == tuple(range(1, len(made.keys) + 1))
    made, _ = planned(layers=(2,), reductions=reductions("rollout", "entropy"))
    assert made.probe.layers == (2, 0, 1)
    assert made.probe.combine is None
    made, _ = planned(layers=(2,), attention=False, reductions=())
    assert made.probe.layers == ()
    made, _ = planned(layers=(2,), attention=False, reductions=reductions("norms"), combine="max")
    assert made.probe.norms is True
    assert made.probe.combine is None


def test_caps_count_what_is_computed_and_what_is_answered():
    made, passage = planned(layers=(2,), attention=False, focus=Place("bank"), reductions=reductions("top_k"))
    n = len(passage)
    assert weights_of(made, passage, HEADS) == HEADS * n
    assert values_of(made, HEADS) == HEADS * 3 * 2
    made, _ = planned(layers=(2,), attention=False, focus=Place("bank"), reductions=reductions("rollout"))
    assert weights_of(made, passage, HEADS) == LAYERS * HEADS * n * n
    assert values_of(made, HEADS) == n
    made, _ = planned(layers=(0, 1), combine="mean", reductions=reductions("entropy", layers=(0, 1)))
    assert weights_of(made, passage, HEADS) == 2 * HEADS * n * n
    assert values_of(made, HEADS) == 2 * n * n + 2 * n


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(texts(PIECES), questions, st.booleans(), st.booleans())
def test_values_are_as_many_as_announced(text, question, attention, narrow):
    passage, tokens, words = annotated(READERS["WordPiece"], text)
    named = reductions("entropy", "distance", "rollout", "received", "top_k", "kind", layers=question.layers, first=1)
    fields = {**vars(question), "attention": attention, "embeddings": False, "focus": (1,) if narrow else None, "reductions": named}
    made = plan(Question(**fields), passage, tokens, words)
    answer = read(made, encode(made, len(tokens))[0])
    assert len(answer.reductions) == 6
    given_out = (answer.weights.size if attention else 0) + sum(
        reduced.values.size + sum(array.size for array in reduced.more.values()) for reduced in answer.reductions
    )
    assert given_out == values_of(made, HEADS)
    by_name = {reduced.reduction.name: reduced.values for reduced in answer.reductions}
    assert by_name["rollout"].shape == (len(made.queries), len(made.keys))
    assert by_name["rollout"].sum(-1) == pytest.approx(np.ones(len(made.queries)), abs=1e-5)
    if question.combine != "max":
        assert by_name["received"].sum(-1) == pytest.approx(1, abs=1e-5)
