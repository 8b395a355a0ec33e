"""200 texts of many kinds, for comparisons."""

import random

_WORDS = (
    "river bank fish hospital office money music über café naïve Straße 东京 銀行 мир سلام שלום ปลา 😀 👩‍🚀 3.14 e=mc² don't re-read "
    "C++ 'quoted' \"double\" (brackets) semi;colon https://example.org/a?b=c snake_case CamelCase ALLCAPS x² ½ ﬁne — …"
).split()


def _text(seed: int) -> str:
    draws = random.Random(seed)
    words = draws.choices(_WORDS, k=draws.choice([1, 2, 3, 5, 8, 13, 30, 60, 120, 300]))
    return draws.choice([" ", "  ", "\n", "\t", " "]).join(words)


VARIED = [
    "a", "?", " leading", "trailing ", "UPPER", "multi\nline\ntext", "tab\tseparated", "x" * 500, "[SEP] in the text", "[CLS]", "0",
    *(_text(seed) for seed in range(189)),
]  # fmt: skip
