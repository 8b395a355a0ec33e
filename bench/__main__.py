"""`make bench`: this service against Infinity, ONNX Runtime, the obvious service and its own bounds, in one run, as one table.

Every figure is the median of several rounds; in a round each server gets the same load, one after the other, while the others
wait. Ratios are what the table is for: the seconds are this machine's. The last column says how many cores other programs kept
busy meanwhile; where that is not near zero, neither the seconds nor the ratios are worth much.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench import attention, embeddings, memory
from bench.servers import Unavailable
from bench.table import Run, table

PARTS: dict[str, Callable[[Run], None]] = {
    "embeddings": embeddings.loads,
    "forward": embeddings.forward,
    "bfloat16": embeddings.bfloat16,
    "wire": attention.wire,
    "memory": memory.memory,
}


def main() -> None:
    """Run, and print the table."""
    arguments = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of each load, after one to get warm (3)")
    arguments.add_argument("--quick", action="store_true", help="one round of smaller loads: to see that it works")
    arguments.add_argument("--patience", type=float, default=60, help="seconds in all to wait for other programs to be quiet (60)")
    arguments.add_argument("--json", type=Path, help="also write the lines to this file")
    given = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended, too
    run = Run(1 if given.quick else given.rounds, given.quick, 0 if given.quick else given.patience)
    for name in given.only:
        try:
            PARTS[name](run)
        except Unavailable as error:
            run.notes.append(f"not measured: {name}: {error}")
    print(table(run.lines))
    run.notes.append(f"{time.monotonic() - run.started:.0f} s, {run.rounds} rounds")
    print("".join(f"\n{note}" for note in run.notes))
    if given.json:
        given.json.write_text(json.dumps([{**asdict(line), "met": line.met} for line in run.lines], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
