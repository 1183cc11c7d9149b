"""Measures benchmarks, records what they print, and writes `BENCHMARKS.md`.

Run: python -m tests.benchmarks.figures [--run=NAME,NAME | --run=all] [--list]
"""

import argparse
import sys

from tests.benchmarks.figures.page import PAGE, text
from tests.benchmarks.figures.records import is_there, measure, read
from tests.benchmarks.figures.table import BENCHMARKS


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="", help="benchmarks, with commas between them, or all")
    parser.add_argument("--list", action="store_true", help="show all, with the last run of each")
    given = parser.parse_args()
    if given.list:
        for name in BENCHMARKS:
            record = read(name)
            last = f"{record.date}  {record.commit}  {record.seconds:7,.0f} s" if record else "-"
            print(f"{name:20}  {last}")
        return 0
    names = [name for name in given.run.split(",") if name]
    if given.run == "all":
        names = [name for name, one in BENCHMARKS.items() if all(map(is_there, one.needs))]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    failed = []
    for name in names:
        print(f"{name} ...", flush=True)
        try:
            measure(BENCHMARKS[name])
        except ValueError as error:  # the others still run
            print(error, file=sys.stderr)
            failed.append(name)
    PAGE.write_text(text())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
