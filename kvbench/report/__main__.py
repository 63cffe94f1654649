"""``kvbench-report``: rebuild an experiment's report, compare two experiments, or link several.

With one folder, tables, figures and the page are written into it again, from its records alone. With
two, what changed from the first to the second is printed, and written as compare.html and .csv. With
three or more, or with --index, each report is rebuilt where there are records, and index.html beside
them links all pages: kvbench-report results/*
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from kvbench.errors import UserError, complain, disk_line, first_line, printable
from kvbench.records.log import seconds_by_phase
from kvbench.records.read import MANIFEST, StoreError

USAGE, FAILED = 2, 1
NAME = "kvbench-report"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        complain(f"{message}; see {self.prog} --help", self.prog)
        raise SystemExit(USAGE)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 records that cannot be read or files that cannot be written, 2
    wrong usage. Whatever goes wrong is one line; KVBENCH_TRACEBACK=1 shows where."""
    parser = _Parser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", metavar="folder", help="<results>/<experiment>")
    parser.add_argument(
        "--index", action="store_true", help="index.html for one or two folders, too"
    )
    parser.add_argument(
        "--out", help="folder for the comparison (default: compare-<a>-<b>, beside b)"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="also every figure as PNG and PDF, in figures/; print every file's name",
    )
    options = parser.parse_args(arguments)
    folders = [Path(folder) for folder in options.folders]
    index = options.index or len(folders) > 2
    if options.out is not None and (index or len(folders) != 2):
        parser.error("--out is for a comparison of two folders")

    def work() -> None:
        if index:
            _link(folders)
        elif len(folders) == 1:
            _rebuild(folders[0], every=options.list)
        else:
            _compare(folders[0], folders[1], options.out)

    return in_a_line(work, options.folders, NAME)


def in_a_line(work: Callable[[], None], folders: Sequence[str], program: str) -> int:
    """Do some work that reads these folders, and return the exit status.

    Records and manifests of others may hold anything. Whatever goes wrong is therefore one line on
    stderr, and warnings of libraries are not shown.
    """
    gc.disable()  # figures are millions of objects that live until the page is written
    try:
        with warnings.catch_warnings(action="ignore"):
            work()
    except Exception as error:
        if os.environ.get("KVBENCH_TRACEBACK"):
            raise
        line = disk_line(error) if isinstance(error, OSError) else first_line(error)
        if not isinstance(error, UserError | OSError | ImportError):
            line = f"{', '.join(folders)} cannot be read: {type(error).__name__}: {line}"
        complain(line, program)
        return FAILED
    finally:
        gc.enable()
    return 0


def _rebuild(folder: Path, *, every: bool = False) -> None:
    """Rebuild an experiment's report, and print where it is; of `every` file the name, the figures'
    among them."""
    from kvbench.report.build import build_report

    paths = build_report(folder, for_print=every)
    for warning in paths.warnings:
        complain(f"warning: {warning}", NAME)
    files = [*paths.tables, *paths.figures, paths.page] if every else [paths.page]
    for path in files:
        print(printable(str(path)))
    if spent := seconds_by_phase(folder):
        print(spent)


def _link(folders: list[Path]) -> None:
    """Rebuild the reports of which there are records, then the page that links all."""
    from kvbench.report.page import write_index

    for folder in folders:
        if not folder.exists():
            raise StoreError(f"no results in {folder}: the folder does not exist")
        if any(folder.glob(f"*/*/*/{MANIFEST}")):
            _rebuild(folder)
    print(printable(str(write_index(folders))))


def _compare(first: Path, second: Path, out: str | None) -> None:
    from kvbench.report.compare import comparison_of, write_comparison
    from kvbench.report.render import terminal
    from kvbench.report.runs import load_experiment

    comparison = comparison_of(load_experiment(first), load_experiment(second))
    terminal(comparison.tables)
    names = [folder.resolve().name for folder in (first, second)]
    if names[0] == names[1]:  # in two results folders, whose names tell them apart
        names = [folder.resolve().parent.name for folder in (first, second)]
    beside = second.resolve().parent / "-".join(("compare", *names))
    for path in write_comparison(comparison, Path(out) if out else beside):
        print(printable(str(path)))


if __name__ == "__main__":
    sys.exit(main())
