"""``python -m kvbench.report <experiment folder>``: rebuild tables, figures and the page."""

from __future__ import annotations

import argparse
import sys

from kvbench.report.build import build_report
from kvbench.store import StoreError


def main(arguments: list[str] | None = None) -> int:
    """Build the report of each folder; 1 when one could not be built."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.report", description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="folder", help="<results>/<experiment>")
    status = 0
    for folder in parser.parse_args(arguments).folders:
        try:
            paths = build_report(folder)
        except StoreError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
            continue
        for warning in paths.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(paths.page)
    return status


if __name__ == "__main__":
    sys.exit(main())
