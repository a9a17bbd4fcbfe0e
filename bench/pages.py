"""`python -m bench.pages`: writes the tables of the pages from the committed results (`docs/results`).

A table of a page stands between `<!-- table BENCHMARK/TABLE -->` and `<!-- end -->`, where only this command writes.
Below it stand the command, the date and the machine. `--check` writes nothing and exits 1 where a page differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.runner import ROOT, last_results, load
from specdec.errors import ConfigError

PLACE = re.compile(r"<!-- table ([\w-]+)/([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def pages() -> Iterator[Path]:
    """The files that may have tables."""
    yield from (ROOT / "README.md", ROOT / "models" / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def table_text(benchmark_name: str, table_name: str) -> str:
    """Returns a table and where it comes from, as a page has it. Raises ConfigError where there is none."""
    benchmark = load(benchmark_name)
    results = last_results(benchmark)
    if results is None:
        made = f"python -m bench.{benchmark_name} --commit-results"
        raise ConfigError(f"there is no docs/results/{benchmark_name}.json; {made} makes it")
    tables = {table.name: table for table in benchmark.tables(results)}
    if table_name not in tables:
        raise ConfigError(f"{benchmark_name} has no table {table_name!r}; it has {', '.join(tables)}")
    run = results.run
    source = f"`{run['command']}`, {run['date']}, commit {run['commit']}: {run['machine']}."
    return f"{tables[table_name].markdown()}\n\n{source}"


def filled(page: str) -> str:
    """Returns the text of a page with its tables made anew. Raises ConfigError."""

    def table(found: re.Match[str]) -> str:
        return f"<!-- table {found[1]}/{found[2]} -->\n{table_text(found[1], found[2])}\n<!-- end -->"

    return PLACE.sub(table, page)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page differs")
    asked = parser.parse_args()
    differing = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            new = filled(text)
        except ConfigError as error:
            print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        if new != text:
            differing.append(str(page.relative_to(ROOT)))
            if not asked.check:
                page.write_text(new, encoding="utf-8")
    print(f"{'differ from the results' if asked.check else 'written'}: {', '.join(differing) or 'none'}")
    return int(asked.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
