"""Builds a static web site of results: ``kvbench-report --site <folder> results/*``.

The site has an index; the report's page of every experiment; a page of every method, with its docstring,
its options, what it was checked against and its results; a reference of the Python interface, which pdoc
makes from docstrings; and a page that says how to add a result. No page loads anything from another
host.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from pydoc import locate
from typing import Any

import pandas as pd
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvbench.errors import needs_extra, printable, printable_lines
from kvbench.records.read import StoreError
from kvbench.report.frame import COLUMNS

_HERE = Path(__file__).parent
_METHODS = _HERE.parent / "methods" / "README.md"
PAGE = "report.html"
INTERFACE = (
    "kvbench.api",
    "kvbench.budget",
    "kvbench.kv",
    "kvbench.methods",
    "kvbench.methods.base",
    "kvbench.tasks",
    "kvbench.records.read",
    "kvbench.report.experiment",
    "kvbench.report.frame",
    "kvbench.report.loading",
)
"""The modules of the reference: those that a user's Python code calls, derives from or reads."""


@dataclass(frozen=True)
class MethodPage:
    """The content of a method's page.

    Attributes:
        name: the name on the command line.
        about: one line about the method.
        doc: the docstring of its class.
        options: for each option its name, its default and what is allowed.
        checked: what the method was checked against.
        paper: the paper, as text.
        results: the score of every variant in each experiment, with interval, prompts and ratio.
    """

    name: str
    about: str
    doc: str
    options: Sequence[Mapping[str, str]]
    checked: str
    paper: str
    results: Sequence[Mapping[str, str]]


def build_site(out: Path, folders: Sequence[Path], *, reference: bool = True) -> Path:
    """Write the site and return the file of its index.

    Args:
        out: the folder of the site: a new or an empty one, or an earlier site, whose pages are
            replaced.
        folders: the folders of experiments. Those without a report are left out.
        reference: whether the site has the reference of the Python interface.

    Raises:
        StoreError: no folder has a report, `out` has files that are no site, or pdoc is not installed.
    """
    with_report = [folder for folder in folders if (folder / PAGE).is_file()]
    if not with_report:
        named = ", ".join(map(str, folders))
        raise StoreError(f"no reports in {named:.200}; expected {PAGE} in each")
    if out.exists() and any(out.iterdir()) and not (out / ".kvbench-site").is_file():
        raise StoreError(f"{out} holds other files; allowed: a new folder, or one of --site")
    for part in ("experiments", "methods", "api"):  # what else is in it, such as CNAME, is a user's
        shutil.rmtree(out / part, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / ".kvbench-site").touch()
    for folder in with_report:
        _copy_report(folder, out / "experiments" / folder.name)
    methods = method_pages(with_report)
    for page in methods:
        _write(out / "methods" / f"{page.name}.html", "method", page.name, page=page)
    _write(out / "add.html", "add", "How to add your result")
    if reference:
        _write_reference(out / "api")
    index = out / "index.html"
    experiments = [folder.name for folder in with_report]
    shown = {"experiments": experiments, "methods": methods, "reference": reference}
    _write(index, "index", "kvbench", **shown)
    return index


def _copy_report(folder: Path, target: Path) -> None:
    """Copy an experiment's page, and its tables and figures if there are files of them."""
    target.mkdir(parents=True)
    shutil.copy(folder / PAGE, target)
    for kind, pattern in (("tables", "*.csv"), ("figures", "*.png")):
        for file in sorted((folder / kind).glob(pattern)):
            (target / kind).mkdir(exist_ok=True)
            shutil.copy(file, target / kind)


def method_pages(folders: Sequence[Path]) -> list[MethodPage]:
    """The page of every method of conf/method, sorted by name."""
    from kvbench.catalogue import catalogue, config_dir

    results = results_of(folders)
    pages = []
    for name, about in catalogue("methods").items():
        config = _composed(config_dir() / "method", name)
        kind: Any = locate(str(config.pop("_target_")))
        own = results[results["method"] == name]
        row = _checked_rows().get(name, {})
        pages.append(
            MethodPage(
                name=name,
                about=about,
                doc=inspect.getdoc(kind) or "",
                options=_options(kind, config),
                checked=row.get("checked against", ""),
                paper=row.get("paper", "") or str(getattr(kind, "paper", "")),
                results=[_shown_result(line) for _, line in own.iterrows()],
            )
        )
    return pages


def _composed(folder: Path, name: str) -> dict[str, Any]:
    """The options in a method's YAML file and in those of its defaults list."""
    config = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    inherited: dict[str, Any] = {}
    for base in config.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            inherited |= _composed(folder, base.partition("@")[0])
    return inherited | config


def _options(kind: Any, config: Mapping[str, Any]) -> list[dict[str, str]]:
    """For each option its name, its default (from the YAML file or else the class) and its type."""
    return [
        {
            "name": field.name,
            "value": str(config.get(field.name, field.default)),
            "allowed": str(field.type),
        }
        for field in fields(kind)
        if field.init
    ]


@cache
def _checked_rows() -> Mapping[str, Mapping[str, str]]:
    """By method its row in the table of kvbench/methods/README.md, as plain text in place of
    Markdown."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _METHODS.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    head, _, *rows = lines
    rows_by_name: dict[str, Mapping[str, str]] = {}
    for cells in rows:
        plain = [re.sub(r"\[([^\]]*)\]\(([^)]*)\)", r"\1 (\2)", cell) for cell in cells]
        row = dict(zip(head, (cell.replace("`", "") for cell in plain), strict=False))
        for name in re.findall(r"`(\w+)`", cells[0]):
            rows_by_name.setdefault(name, row)
    return rows_by_name


def results_of(folders: Sequence[Path]) -> pd.DataFrame:
    """The total scores of all variants, and their measured ratios, from the CSV tables of reports."""
    parts = [pd.DataFrame(columns=[*COLUMNS, "experiment", "ratio"])]
    for folder in folders:
        for file in sorted((folder / "tables").glob("*.csv")):
            frame = pd.read_csv(file, comment="#")
            if tuple(frame.columns) != COLUMNS or "-by-" in file.stem:
                continue
            keys = ["variant", "by"]
            ratios = frame[frame["measure"] == "ratio"].drop_duplicates("variant")
            ratio = ratios.set_index("variant")["mean"]
            scores = frame[frame["measure"] == "score"].drop_duplicates(keys, keep="last")
            parts.append(scores.assign(experiment=folder.name, ratio=scores["variant"].map(ratio)))
    return pd.concat(parts, ignore_index=True)


def _shown_result(row: pd.Series) -> dict[str, str]:
    """The cells of a result, by the heading of their column."""
    return {
        "experiment": str(row["experiment"]),
        "task": str(row["task"]),
        "model": str(row["model"]),
        "variant": str(row["variant"]),
        "score": f"{row['mean']:.3g} {row['unit']}",
        "95 % interval": f"{row['low']:.3g} to {row['high']:.3g}",
        "prompts": f"{row['units']:.0f}",
        "ratio": "" if pd.isna(row["ratio"]) else f"{row['ratio']:.2f}",
    }


def _write_reference(folder: Path) -> None:
    """Write the reference of the modules of `INTERFACE`, with pdoc."""
    try:
        import pdoc
    except ModuleNotFoundError as error:
        raise StoreError("--site: " + needs_extra("pdoc", "site")) from error
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*INTERFACE, output_directory=folder)


def _write(path: Path, kind: str, title: str, **values: Any) -> None:
    """Write a page of the site from the template, in which every value is escaped.

    Args:
        kind: the part of the template to use: "index", "method" or "add".
        values: the variables of that part.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        finalize=lambda value: printable_lines(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (_HERE / "templates" / "page.css").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    root = "" if kind in ("index", "add") else "../"
    template = environment.get_template("site.html.j2")
    page = template.render(kind=kind, title=printable(title), style=style, root=root, **values)
    path.write_text(page, encoding="utf-8")
