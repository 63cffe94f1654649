"""A landing page: several experiments linked and summarised; and a folder for a static host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from kvbench.errors import disk_line, printable
from kvbench.records.durable import make_folder, read_file
from kvbench.records.read import StoreError
from kvbench.report.files import is_made, write_bytes, write_text
from kvbench.report.render.page import environment, page_parts
from kvbench.report.render.summary import SUMMARY, Summary, read_summary

_PAGE = "report.html"


def write_landing(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write index.html for the experiments whose reports lie in `folders`; returns its path.

    Args:
        folders: those without a report are left out.
        out: a folder to copy every report into, with its tables and figures, and the page; None: the
            page alone goes beside the folders, linking them where they lie.

    Raises:
        StoreError: none has a report, two would have the same name in `out`, or a file cannot be
            written.
    """
    found = [
        (folder, read_summary(folder) or Summary(printable(folder.resolve().name)))
        for folder in folders
        if (folder / _PAGE).is_file()
    ]
    if not found:
        raise StoreError(
            f"no reports in {', '.join(map(str, folders)):.200}; expected folders of experiments, each"
            f" with records, or with {_PAGE}"
        )
    names = [folder.resolve().name for folder, _ in found]
    if out is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise StoreError(f"two experiments are called {twice!r}; allowed: each name once")
    try:
        place = out
        if place is None:
            parents = [str(folder.resolve().parent) for folder, _ in found]
            place = Path(os.path.commonpath(parents))
        place.mkdir(parents=True, exist_ok=True)
        entries = []
        for (folder, summary), name in zip(found, names, strict=True):
            if out is not None:
                _copy(folder, out, name)
            link = Path(name) if out is not None else folder.resolve().relative_to(place)
            entries.append((quote(f"{link.as_posix()}/{_PAGE}"), summary))
        return write_text(place / "index.html", _rendered(place, entries))
    except OSError as error:
        raise StoreError(f"cannot write the landing page: {disk_line(error)}") from error


def _rendered(place: Path, entries: Sequence[tuple[str, Summary]]) -> str:
    title = printable(place.resolve().name)
    template = environment().get_template("index.html.j2")
    return template.render(**page_parts(), title=title, entries=entries)


def _copy(folder: Path, out: Path, name: str) -> None:
    """What a report wrote, and nothing else: no records."""
    make_folder(out / name, out)
    files = [path for path in (folder / _PAGE, folder / SUMMARY) if path.is_file()]
    for part in ("tables", "figures"):
        made = sorted((folder / part).glob("*"))
        made = [path for path in made if is_made(path.relative_to(folder)) and path.is_file()]
        if made:
            make_folder(out / name / part, out)
        files += made
    for path in files:
        write_bytes(out / name / path.relative_to(folder), read_file(path))
