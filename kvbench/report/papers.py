"""How an experiment's config describes the paper it reproduces: under ``differs`` how its settings are
known to differ, under ``paper_table`` the published table that stands beside it.

Under ``paper_table`` stands the name of a CSV of results/paper, a mapping, or a list of either:

    file: subgen_table1        results/paper/subgen_table1.csv
    where: {shots: 5}          only these of its rows
    model: opt_6_7b            the model taken where the paper names none (others: no difference)
    statistic: minimum         what the paper prints of repeated runs; mean if it is not said

Nothing here imports pandas, so that ``kvbench show`` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from kvbench.errors import UserError, check_known
from kvbench.errors.options import check_options, only

HEADING = "differs from the paper"
_NAME = re.compile(r"[\w+=@,-][\w.+=@,-]{0,119}")
"""A file's name, not a path: tables lie in one folder."""


class PaperError(UserError, ValueError):
    """A ``paper_table`` that cannot be read: one line that names it and what is wrong."""


@dataclass(frozen=True)
class PaperTable:
    file: Annotated[str, only(_NAME.fullmatch, "the name of a file of results/paper")]
    where: Mapping[str, Any] | None = None
    model: str | None = None
    statistic: Literal["mean", "minimum"] = "mean"

    def __post_init__(self) -> None:
        check_options(self, "paper_table.", PaperError)


def paper_folders() -> list[Path]:
    """Where the published tables are: in a wheel in the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    return [package / "paper", package.parent / "results" / "paper"]


def file_of(spec: PaperTable, results_dir: Path) -> Path:
    """The CSV file of a published table: in the folder ``paper`` of the results, or in the repository's
    results/paper."""
    places = [results_dir.resolve() / "paper", *paper_folders()]
    files = {path.stem: path for place in reversed(places) for path in place.glob("*.csv")}
    name = spec.file.removesuffix(".csv")
    check_known(f"paper_table is {name!r}", name, sorted(files), PaperError)
    return files[name]


def specs_of(paper_table: Any) -> list[PaperTable]:
    named = [paper_table] if isinstance(paper_table, str | Mapping) else paper_table or []
    if not isinstance(named, Sequence) or not all(
        isinstance(table, str | Mapping) for table in named
    ):
        raise PaperError(
            f"paper_table is {paper_table!r:.200}; allowed: a file of results/paper, a mapping, a list"
        )
    known = [field.name for field in fields(PaperTable)]
    tables = []
    for spec in named:
        options: dict[str, Any] = {"file": spec} if isinstance(spec, str) else dict(spec)
        for key in set(options) - set(known):
            raise PaperError(f"paper_table.{key} is unknown; allowed: {', '.join(known)}")
        options.setdefault("file", None)
        tables.append(PaperTable(**options))
    return tables


def notes_on(differs: Sequence[str] | None) -> list[str]:
    """One note for each known difference of an experiment's settings from its paper's; none where
    nobody looked (`differs` is None, and not empty)."""
    if differs is None:
        return []
    lines = [" ".join(str(line).split()) for line in differs] or ["in no setting that is known."]
    return [f"{HEADING}: {line}" for line in lines]
