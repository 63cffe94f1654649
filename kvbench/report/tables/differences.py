"""What an experiment's config says about the published table that it stands beside.

Nothing here imports pandas, so that ``kvbench show`` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.records.schema import SchemaError, check_paper_table

HEADING = "differs from the paper"


class PaperError(UserError, ValueError):
    """A ``paper_table`` that cannot be read: one line that names it and what is wrong."""


def paper_folders() -> list[Path]:
    """Where the published tables are: in a wheel in the package, in a checkout beside it."""
    package = Path(__file__).parents[2]
    return [package / "paper", package.parent / "results" / "paper"]


def specs_of(paper_table: Any) -> list[dict[str, Any]]:
    """The published tables that ``paper_table`` names (a file, a mapping, a list of either), each as a
    mapping with its ``file``.

    Raises:
        PaperError: it is none of these, names what is no file's name, or holds a value of a wrong type.
    """
    if not paper_table:
        return []
    each = [paper_table] if isinstance(paper_table, str | Mapping) else paper_table
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
        try:
            check_paper_table(spec)
        except SchemaError as error:
            raise PaperError(f"paper_table {name}: {error}") from error
    return specs


_NAME = re.compile(r"[\w+=@,-][\w.+=@,-]{0,119}")
"""No path: tables lie in one folder."""


def differences_of(spec: Mapping[str, Any]) -> tuple[str, ...] | None:
    """How the experiment is known to differ from the paper's; None where nobody looked.

    Raises:
        PaperError: ``differences`` is no list of lines.
    """
    found = spec.get("differences")
    if found is None:
        return None
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise PaperError(f"paper_table.differences is {found!r:.200}; allowed: a list of lines")
    return tuple(" ".join(str(line).split()) for line in found)


def notes_on(differences: Sequence[str] | None) -> list[str]:
    """One note for each difference, to go beneath the published table; one where none is known."""
    if differences is None:
        return []
    if not differences:
        return [f"{HEADING.capitalize()}: in no setting that is known."]
    return [f"{HEADING.capitalize()}: {line}" for line in differences]


def comments_on(paper_table: Any) -> list[str]:
    """The same as comments of a YAML, each line once, and the file it is about.

    Raises:
        PaperError: see `specs_of` and `differences_of`.
    """
    lines: dict[str, None] = {}
    for spec in specs_of(paper_table):
        for note in notes_on(differences_of(spec)):
            text = f"# {note[0].lower()}{note[1:]} ({spec.get('file')})"
            lines[" ".join(text.split())] = None
    return list(lines)
