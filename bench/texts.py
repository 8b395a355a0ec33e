"""The texts of the benchmark: written by a small grammar, the same on every machine, none twice.

Every word of the vocabulary is one piece for BERT's uncased tokenizer, so `count_tokens` is exact for the default model
without loading a tokenizer (a test holds it to that). Nothing here imports anything but the standard library.
"""

import random
import re
from dataclasses import dataclass

SUBJECTS = (
    "the old baker,a young doctor,our new neighbor,the village teacher,my older sister,the night guard,a retired captain,"
    "the town council,every good farmer,the quiet student,a famous singer,the bank manager,his best friend,the bus driver,"
    "a group of children,the museum guide,the chief engineer,a small company,the local paper,her english cousin"
).split(",")
VERBS = (
    "carried,found,painted,sold,repaired,described,remembered,moved,opened,studied,watched,bought,measured,borrowed,"
    "promised,returned,cleaned,shared,lost,counted"
).split(",")
OBJECTS = (
    "a heavy wooden box,the last train ticket,two empty glass bottles,the story of the flood,a map of the coast,"
    "the keys of the church,some fresh bread,a letter from the north,the broken clock,an offer for the land,"
    "a basket of green apples,the plan for the new bridge,a bag of silver coins,the winter coat,three pages of notes,"
    "a picture of the harbor,the price of coal,the first copy of the book,a piece of blue cloth,the oldest tree"
).split(",")
PLACES = (
    "near the river bank,behind the station,in the city library,on the second floor,under the stone bridge,"
    "at the edge of the forest,across the market square,inside the empty theater,along the northern road,"
    "by the kitchen window,over the hills,in a quiet garden,outside the hospital,at the post office,next to the lake"
).split(",")
TIMES = (
    "before the storm,after a long meeting,early in the morning,late on sunday,during the summer,at the end of the war,"
    "while it was raining,a week ago,in the spring of that year,just before midnight,when the music stopped,once again"
).split(",")
REASONS = (
    "because nobody else had the time,so that the work could begin,although the weather was bad,"
    "and nobody asked for the reason,since the old one was gone,but the result was a surprise,"
    "which made the whole family happy,as the law had always required,even if it took the whole day,"
    "while the others waited in the car"
).split(",")
ADJECTIVES = "warm,cheap,quiet,modern,simple,strong,rare,bright,light,public,digital,fresh,safe,large,early".split(",")
NOUNS = (
    "coat,camera,garden,kitchen,bridge,engine,school,river,ticket,bicycle,hotel,island,window,library,market,"
    "doctor,battery,train,piano,lamp,insurance,contract,recipe,museum,weather"
).split(",")
USES = (
    "for a long walk,near the old harbor,with free delivery,for young children,in cold weather,on a small budget,"
    "without a car,for two people,open on sunday,after the storm,made of glass,under water,at night,in the north"
).split(",")

SPECIALS = 2
"""[CLS] and [SEP], which the tokenizer puts around every text."""


@dataclass(frozen=True)
class Text:
    """A text and the number of its tokens, special tokens included."""

    text: str
    tokens: int


def count_tokens(text: str) -> int:
    """Tokens of a text made here, special tokens included: its words and marks, each one piece."""
    return len(re.findall(r"\w+|[^\w\s]", text)) + SPECIALS


def _sentence(rng: random.Random) -> str:
    subject, verb, thing = rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(OBJECTS)
    place, time, reason = rng.choice(PLACES), rng.choice(TIMES), rng.choice(REASONS)
    core = f"{subject} {verb} {thing}"
    forms = (f"{core} {place}", f"{time}, {core} {place}", f"{core} {place} {time}", f"{core} {place}, {reason}",
             f"{time}, {core} {place}, {reason}")  # fmt: skip
    return rng.choice(forms).capitalize() + "."


def _short(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(USES)}"


def _filled(rng: random.Random, tokens: int) -> str:
    """Sentences up to exactly so many tokens; the last one is cut where it has to be."""
    text = _sentence(rng)
    while count_tokens(text) < tokens:
        text += " " + _sentence(rng)
    words = re.findall(r"\s?(?:\w+|[^\w\s])", text)
    return "".join(words[: tokens - SPECIALS]).strip()


def _distinct(kind: str, count: int, seed: int) -> list[Text]:
    rng = random.Random(f"{kind} {seed}")
    seen: dict[str, Text] = {}
    while len(seen) < count:
        match kind:
            case "short":
                text = _short(rng)
            case "sentence":
                text = _sentence(rng)
            case "paragraph":
                text = " ".join(_sentence(rng) for _ in range(rng.randint(3, 6)))
            case "long":
                text = _filled(rng, rng.randint(200, 256))
            case "full":
                text = _filled(rng, 256)
            case _:
                raise ValueError(f"no such kind of text: {kind}")
        seen.setdefault(text, Text(text, count_tokens(text)))
    return list(seen.values())


def make(kind: str, count: int, seed: int = 0) -> list[Text]:
    """So many different texts of a kind, always the same ones for the same arguments.

    Kinds: `short` (6 to 8 tokens), `sentence`, `paragraph` (3 to 6 sentences), `long` (200 to 256 tokens),
    `full` (256 tokens exactly), and `mix`: of ten texts six are sentences, three are paragraphs, one is long, shuffled.

    Raises ValueError for a kind that is none of these.
    """
    if kind != "mix":
        return _distinct(kind, count, seed)
    long, paragraphs = count // 10, count * 3 // 10
    texts = _distinct("sentence", count - long - paragraphs, seed)
    texts += _distinct("paragraph", paragraphs, seed) + _distinct("long", long, seed)
    random.Random(f"mix {seed}").shuffle(texts)
    return texts
