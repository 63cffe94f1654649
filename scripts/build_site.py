"""A folder for a static host: ``python scripts/build_site.py site results/*`` (`make site`).

It has an index, the pages of experiments with their tables and figures, and the Python interface as pdoc
(``kvbench[site]``) shows it, with every method's docstring and options. What else is in the folder, such
as CNAME, stays.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from urllib.parse import quote

import pdoc

from kvbench.methods import available_methods
from kvbench.report.page import PAGE, html
from kvbench.report.render import PAGE_MARK, write_text

INTERFACE = (
    "kvbench.api",
    "kvbench.budget",
    "kvbench.kv",
    "kvbench.methods",
    "kvbench.methods.base",
    *(f"kvbench.methods.{name}" for name in available_methods()),
    "kvbench.tasks",
    "kvbench.records.read",
    "kvbench.report.runs",
    "kvbench.report.frame",
)
"""The modules that a user's Python code calls, derives from or reads."""


def build_site(out: Path, folders: list[Path]) -> Path:
    """Write the site of the experiments that have a page; returns its index."""
    links = []
    for folder in (folder for folder in folders if (folder / PAGE).is_file()):
        place = Path("experiments", folder.name)
        shutil.rmtree(out / place, ignore_errors=True)
        for pattern in (PAGE, "tables/*.csv", "figures/*.svg", "figures/*.png"):
            for file in folder.glob(pattern):
                copy = out / place / file.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
        links.append((quote(f"{place}/{PAGE}"), folder.name))
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*INTERFACE, output_directory=out / "api")
    links.append(("api/index.html", "The interface in Python, with the methods"))
    return write_text(
        out / "index.html", html("index.html.j2", title="kvbench", links=links), PAGE_MARK
    )


if __name__ == "__main__":
    print(build_site(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]]))
