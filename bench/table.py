"""The lines of the benchmark's table, and the figures that they are made of."""

import sys
import time
from dataclasses import dataclass, field
from statistics import median, quantiles

from bench.client import Outcome
from bench.neighbours import Neighbours


@dataclass(frozen=True)
class Line:
    """One line: a figure of ours, what it is compared with, the goal for their ratio, and the cores that others kept busy meanwhile.

    A goal is `≥ 1.5`, `≤ 1.5` or `> 1.5`, or `-` where there is none. A ratio is None when it could not be measured.
    """

    what: str
    ours: str
    against: str
    theirs: str
    ratio: float | None
    goal: str
    others: float = 0.0

    @property
    def met(self) -> str:
        """Whether the ratio reaches the goal."""
        if self.ratio is None:
            return "not measured"
        if self.goal == "-":
            return "-"
        sign, number = self.goal.split()
        reached = {"≥": self.ratio >= float(number), "≤": self.ratio <= float(number), ">": self.ratio > float(number)}[sign]
        return "yes" if reached else "no"


@dataclass
class Figures:
    """What was seen of one server under one load: for each round the number of tokens, and the outcome."""

    rounds: list[tuple[int, Outcome]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second, the median of the rounds."""
        return median(tokens / outcome.seconds for tokens, outcome in self.rounds)

    @property
    def p50(self) -> float:
        """Milliseconds of a request, the median of the rounds' medians."""
        return 1000 * median(median(outcome.latencies) for _, outcome in self.rounds)

    @property
    def p99(self) -> float:
        """Milliseconds that 99 of 100 requests take at most, the median of the rounds."""
        return 1000 * median(percentile(outcome.latencies, 99) for _, outcome in self.rounds)

    def __str__(self) -> str:
        return f"{self.speed:.0f} tok/s, p50 {self.p50:.1f} ms, p99 {self.p99:.1f} ms"


class Run:
    """One run of the benchmark: how thorough it is, and what it found."""

    def __init__(self, rounds: int, quick: bool, patience: float) -> None:
        self.rounds, self.quick = rounds, quick
        self.lines: list[Line] = []
        self.notes: list[str] = []
        self.neighbours = Neighbours(patience)
        self.started = time.monotonic()

    def begin(self, what: str) -> None:
        """Say what is measured next; the lines that follow tell how busy others were from here on."""
        print(f"{time.monotonic() - self.started:5.0f} s  {what}", file=sys.stderr, flush=True)
        self.neighbours.mark()

    def add(self, what: str, ours: str, against: str, theirs: str, ratio: float | None, goal: str = "-") -> None:
        """Add a line to the table."""
        self.lines.append(Line(what, ours, against, theirs, ratio, goal, self.neighbours.cores()))


def percentile(values: list[float], percent: int) -> float:
    """The value that so many percent do not exceed, between two neighbours where it falls between them."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def cosine(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True)) / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def table(lines: list[Line]) -> str:
    """The lines as a table that is also Markdown."""
    rows = [("what", "attend", "against", "", "ratio", "goal", "met", "others")]
    rows += [
        (x.what, x.ours, x.against, x.theirs, "-" if x.ratio is None else f"{x.ratio:.2f}", x.goal, x.met, f"{x.others:.2f}") for x in lines
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])
