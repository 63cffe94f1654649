"""``kvbench-report``: rebuild an experiment's report, compare two experiments, or link several.

With one folder, tables, figures and the page are written into it again, from its records alone. With
two, what changed from the first to the second is printed, and written as compare.html, .md and .csv.
With three or more, or with --index, each report is rebuilt where there are records, and index.html
beside them links and summarises all; what is no experiment is left out: kvbench-report results/*
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from kvbench.errors import complain, disk_line, printable
from kvbench.records.read import MANIFEST, StoreError

USAGE, FAILED = 2, 1


class _Parser(argparse.ArgumentParser):
    """What is wrong, in one line."""

    def error(self, message: str) -> NoReturn:
        complain(f"{message}; see {self.prog} --help", self.prog)
        raise SystemExit(USAGE)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 records that cannot be read or files that cannot be written, 2
    wrong usage."""
    parser = _Parser(
        prog="kvbench-report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="folder", help="<results>/<experiment>")
    parser.add_argument(
        "--index", action="store_true", help="a landing page, for one or two folders, too"
    )
    parser.add_argument(
        "--site", metavar="FOLDER", help="the same, and all reports, copied there for a static host"
    )
    parser.add_argument("--out", help="folder for the comparison (default: compare-<a>-<b>)")
    parser.add_argument(
        "--rescored",
        metavar="OTHER",
        help="the same experiment run again in another dtype or batch size: measure the share of"
        " examples answered anew, keep it in rescored.json and use it beside published numbers",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="also every figure as PNG and PDF, in figures/; print every file's name",
    )
    options = parser.parse_args(arguments)
    folders: list[str] = options.folders
    index = options.index or options.site is not None or len(folders) > 2
    if options.out is not None and (index or len(folders) != 2):
        parser.error("--out is for a comparison of two folders")
    if options.rescored is not None and (index or len(folders) != 1):
        parser.error("--rescored is for the report of one folder")
    try:
        if options.rescored is not None:
            _measure(folders[0], options.rescored)
        if index:
            _link(list(map(Path, folders)), options.site)
        elif len(folders) == 1:
            _rebuild(folders[0], every=options.list)
        else:
            _compare(folders[0], folders[1], options.out)
    except StoreError as error:
        complain(str(error), parser.prog)
        return FAILED
    except OSError as error:
        complain(disk_line(error), parser.prog)
        return FAILED
    return 0


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage in a process that ends soon: figures are millions of objects that live until
    the page is written."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _rebuild(folder: str, *, every: bool) -> None:
    from kvbench.report.build import build_report

    with uncollected():
        paths = build_report(folder, for_print=every)
    for warning in paths.warnings:
        complain(f"warning: {warning}", "kvbench-report")
    for path in (*paths.tables, *paths.figures) if every else ():
        print(printable(str(path)))
    print(printable(str(paths.page)))


def _link(folders: Sequence[Path], site: str | None) -> None:
    """Rebuild the reports of which there are records, then the landing page of all.

    Raises:
        StoreError: nothing lies in one of the folders; or a report could not be rebuilt: the one it had
            stays, and the page links them all before this is said.
    """
    from kvbench.report.render.landing import write_landing

    for folder in folders:
        if not folder.exists():
            raise StoreError(f"no results in {folder}: the folder does not exist")
    failures = []
    found = [folder for folder in folders if folder.is_dir()]
    for folder in found:
        if any(folder.glob(f"*/*/*/{MANIFEST}")):
            try:
                _rebuild(str(folder), every=False)
            except StoreError as error:
                failures.append(error)
    try:
        place = write_landing(found or folders, None if site is None else Path(site))
    except StoreError as error:
        raise (failures or [error])[0] from error
    print(printable(str(place)))
    if failures:
        raise failures[0]


def _measure(folder: str, other: str) -> None:
    from kvbench.report.experiment import load_experiment
    from kvbench.report.stats.margins import measure, write_rescored

    found = measure(load_experiment(Path(folder)), load_experiment(Path(other)))
    for name, one in found.items():
        print(
            f"{name}: f {one.f:.3f}; {100 * one.changed:.1f} % of {one.examples} scores changed"
            f" from {folder} to {other}"
        )
    print(write_rescored(Path(folder), found))


def _compare(first: str, second: str, out: str | None) -> None:
    from kvbench.report.experiment import load_experiment
    from kvbench.report.render.comparison import only_lines, write_comparison
    from kvbench.report.render.terminal import print_tables
    from kvbench.report.tables.change_tables import change_tables
    from kvbench.report.tables.compare import compare

    comparison = compare(load_experiment(Path(first)), load_experiment(Path(second)))
    names = (name.replace("/", "_") for name in comparison.names)
    folder = Path(out) if out is not None else Path("-".join(("compare", *names)))
    paths = write_comparison(comparison, folder)
    print("first: {}\nsecond: {}\n".format(*map(printable, comparison.names)))
    print_tables(t for t in change_tables(comparison) if not t.name.endswith("-by-dataset"))
    for name, lines in only_lines(comparison):
        print(printable(f"only in {name}: {len(lines)} runs"))
    for path in paths:
        print(printable(str(path)))


if __name__ == "__main__":
    sys.exit(main())
