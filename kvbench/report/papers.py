"""What an experiment's config says about the published table that it stands beside.

Under ``paper_table`` stands the name of a CSV of results/paper, a mapping, or a list of either:

    file: subgen_table1        results/paper/subgen_table1.csv
    where: {shots: 5}          only these of its rows
    records: {asked_rate: 0.2} only our records with this value, or with none
    differences: [a, b]        how our settings are known to differ from the paper's; []: in none
    rescored: 0.05             the share of examples that two honest runs answer anew

Nothing here imports pandas, so that ``kvbench show`` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Predicate

from kvbench.errors import UserError
from kvbench.errors.options import Fraction, check_options

HEADING = "differs from the paper"
_NAME = re.compile(r"[\w+=@,-][\w.+=@,-]{0,119}")
"""No path: tables lie in one folder."""


class PaperError(UserError, ValueError):
    """A ``paper_table`` that cannot be read: one line that names it and what is wrong."""


@dataclass(frozen=True)
class PaperTable:
    """A published table that stands beside ours."""

    file: Annotated[str, Predicate(_NAME.fullmatch), "the name of a file of results/paper"]
    where: Mapping[str, Any] | None = None
    records: Mapping[str, Any] | None = None
    differences: Sequence[str] | None = None
    rescored: Fraction | None = None

    def __post_init__(self) -> None:
        check_options(self, "paper_table.", PaperError)

    @property
    def notes(self) -> list[str]:
        """One for each known difference from the paper; none where nobody looked."""
        if self.differences is None:
            return []
        found = [" ".join(line.split()) for line in self.differences]
        return [f"{HEADING}: {line}" for line in found or ["in no setting that is known."]]


def paper_folders() -> list[Path]:
    """Where the published tables are: in a wheel in the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    return [package / "paper", package.parent / "results" / "paper"]


def specs_of(paper_table: Any) -> list[PaperTable]:
    """The published tables that ``paper_table`` names.

    Raises:
        PaperError: it is of a wrong type, names what is no file's name, or has an unknown key.
    """
    each = [paper_table] if isinstance(paper_table, str | Mapping) else paper_table or []
    if not isinstance(each, Sequence) or not all(isinstance(one, str | Mapping) for one in each):
        raise PaperError(
            f"paper_table is {paper_table!r:.200}; allowed: a file of results/paper, a mapping, a list"
        )
    known = [field.name for field in fields(PaperTable)]
    found = []
    for one in ({"file": one} if isinstance(one, str) else one for one in each):
        for key in set(one) - set(known):
            raise PaperError(f"paper_table.{key} is unknown; allowed: {', '.join(known)}")
        found.append(PaperTable(**{"file": None, **one}))
    return found


def comments_on(paper_table: Any) -> list[str]:
    """The known differences as comments of a YAML, each line once, and the file it is about.

    Raises:
        PaperError: see `specs_of`.
    """
    lines = [f"# {note} ({spec.file})" for spec in specs_of(paper_table) for note in spec.notes]
    return list(dict.fromkeys(lines))
