"""Every number in the READMEs that show results stands in a committed table, which the text names.

A paragraph (or item of a list) with numbers has a comment that says where they stand, for example
``<!-- from lines/tables/x.csv variant=snapkv; y.csv -->``: each number is then the rounded value of a
cell of these rows, as it is or in per cent. Tables between ``<!-- table ... -->`` are made by
scripts/readme_tables.py, which is run here. What is no measurement (versions, sizes of an experiment)
is in SETUP, as the phrase in which it stands.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.paths import ROOT

RESULTS = ROOT / "results"
READMES = ("README.md", "results/README.md", "kvbench/assets/recall_mini/README.md")
CONF = ("conf/README.md", "conf/README-sweeps.md", "conf/README-experiments.md")
COUNTED = "bits?|(new )?tokens|[GM]B|layers?|draws?|prompts|examples|cases|essays|articles|minutes"
SETUP = re.compile(
    r"SmolLM2-135M|Python 3\.\d+|95 %|Apache-2\.0|layers? \d+(, \d+)*( and \d+)?"
    r"|seeds? \d|(Table|Figure|blocks of) \d+|\(x \+ 1\) / \(n \+ 2\)|Westfall 2008"
    r"|1,024 of an essay|50 official cases|[\d,]+ to [\d,]+ tokens|records of 400 lines"
    rf"|[\d,]+ ({COUNTED})\b"
)
NUMBER = re.compile(r"(?<![\w.,/])[-−+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?![\w/])")


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and items of lists outside code blocks and generated tables."""
    text = re.sub(r"<!-- (table|figure) (\w+) -->.*?<!-- end \2 -->", "", text, flags=re.S)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    for block in re.split(r"\n\s*\n", text):
        yield from re.split(r"\n(?=- )", block)


def measurements(paragraph: str) -> list[str]:
    """The numbers of a paragraph that are measurements."""
    text = re.sub(r"<!--.*?-->", "", paragraph, flags=re.S)
    text = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "", text)
    return NUMBER.findall(SETUP.sub("", " ".join(text.split())))


def cells(source: str) -> Iterator[float]:
    """The numbers in the rows that ``<file> key=value ...`` names."""
    file, *conditions = source.split()
    where = dict(condition.split("=", 1) for condition in conditions)
    with (RESULTS / file).open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if all(row[column] == value for column, value in where.items()):
                for cell in row.values():
                    try:
                        yield float(cell)
                    except ValueError:
                        continue


def stands(number: str, values: list[float]) -> bool:
    """Whether one of the values, or a hundred times it, is `number` when rounded to its digits."""
    plain = number.replace(",", "").replace("−", "-").lstrip("+-")
    if plain.startswith("."):
        plain = f"0{plain}"
    digits = len(plain.partition(".")[2])
    return any(
        f"{sign * scale * value:.{digits}f}" == plain
        for value in values
        for scale in (1, 100)
        for sign in (1, -1)
    )


def sources(paragraph: str) -> list[str]:
    """The tables that a paragraph names, each with its condition on rows."""
    named = re.findall(r"<!-- from (.*?) -->", paragraph, re.S)
    return [source for comment in named for source in comment.split(";")]


def missing_from_sources(paragraph: str) -> list[tuple[str, str]]:
    """The numbers of a paragraph that stand in none of the tables it names, each with its beginning."""
    values = [value for source in sources(paragraph) for value in cells(source)]
    numbers = measurements(paragraph)
    return [(number, paragraph[:60]) for number in numbers if not stands(number, values)]


@pytest.mark.parametrize("name", READMES)
def test_every_number_stands_in_a_committed_table(name: str) -> None:
    missing = []
    for paragraph in paragraphs((ROOT / name).read_text(encoding="utf-8")):
        missing += missing_from_sources(paragraph)
    assert not missing


def test_numbers_are_read_as_they_are_written() -> None:
    text = "It fell from .57 to 0.5, by −12.5 % (`5` and Table 3 aside), over 1,024 of 7."
    assert measurements(text) == [".57", "0.5", "−12.5", "1,024", "7"]
    assert stands(".57", [0.5712])
    assert stands("57", [0.5712])
    assert not stands(".58", [0.5712])


MEASURED = re.compile(
    r"(?<![\w.,/])\d[\d,.]* ?(times|%|per cent|(milli|micro)?seconds|m?s|minutes|hours|[GM]i?B)(?!\w)"
)


@pytest.mark.parametrize("name", [*CONF, "CHANGELOG.md"])
def test_a_number_that_reads_as_measured_says_where_it_is_from(name: str) -> None:
    """Where most numbers are options: a share, a ratio, a time or a size needs a source, or a comment
    ``<!-- no measurement: ... -->`` that says what it is."""
    for paragraph in paragraphs((ROOT / name).read_text(encoding="utf-8")):
        text = re.sub(r"<!--.*?-->|`[^`]*`", "", paragraph, flags=re.S)
        if MEASURED.search(text):
            if sources(paragraph):
                assert not missing_from_sources(paragraph)
            else:
                assert "<!-- no measurement: " in paragraph, paragraph[:80]


def test_the_tables_are_what_results_say() -> None:
    script = [sys.executable, str(ROOT / "scripts/readme_tables.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
