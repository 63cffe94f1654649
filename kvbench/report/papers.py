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
from pathlib import Path
from typing import Any

from kvbench.errors import UserError

HEADING = "differs from the paper"
_NAME = re.compile(r"[\w+=@,-][\w.+=@,-]{0,119}")
"""No path: tables lie in one folder."""
_KEYS: dict[str, Any] = {
    "where": Mapping,
    "records": Mapping,
    "differences": list,
    "rescored": (int, float),
}


class PaperError(UserError, ValueError):
    """A ``paper_table`` that cannot be read: one line that names it and what is wrong."""


def paper_folders() -> list[Path]:
    """Where the published tables are: in a wheel in the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    return [package / "paper", package.parent / "results" / "paper"]


def specs_of(paper_table: Any) -> list[dict[str, Any]]:
    """The published tables that ``paper_table`` names, each as a mapping with its ``file``.

    Raises:
        PaperError: it is of a wrong type, names what is no file's name, or has an unknown key.
    """
    each = [paper_table] if isinstance(paper_table, str | Mapping) else paper_table or []
    if not isinstance(each, Sequence) or not all(isinstance(one, str | Mapping) for one in each):
        raise PaperError(
            f"paper_table is {paper_table!r:.200}; allowed: a file of results/paper, a mapping, a list"
        )
    specs = [{"file": one} if isinstance(one, str) else dict(one) for one in each]
    for spec in specs:
        name = spec.get("file")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PaperError(
                f"paper_table.file is {name!r:.200}; allowed: the name of a file of results/paper"
            )
        for key, value in spec.items():
            if key != "file" and key not in _KEYS:
                raise PaperError(f"paper_table.{key} is unknown; allowed: file, {', '.join(_KEYS)}")
            share = key != "rescored" or not isinstance(value, int | float) or 0 <= value <= 1
            if (
                key != "file"
                and value is not None
                and not (isinstance(value, _KEYS[key]) and share)
            ):
                raise PaperError(f"paper_table.{key} is {value!r:.200}; allowed: see {__name__}")
    return specs


def notes_on(spec: Mapping[str, Any]) -> list[str]:
    """One note for each known difference from the paper; none where nobody looked."""
    found = spec.get("differences")
    if found is None:
        return []
    lines = [" ".join(str(line).split()) for line in found] or ["in no setting that is known."]
    return [f"{HEADING.capitalize()}: {line}" for line in lines]


def comments_on(paper_table: Any) -> list[str]:
    """The same as comments of a YAML, each line once, and the file it is about.

    Raises:
        PaperError: see `specs_of`.
    """
    lines = [
        f"# {note[0].lower()}{note[1:]} ({spec['file']})"
        for spec in specs_of(paper_table)
        for note in notes_on(spec)
    ]
    return list(dict.fromkeys(lines))
