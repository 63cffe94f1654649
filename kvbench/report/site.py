"""A folder for a static host: ``kvbench-report --site <folder> results/*``.

An index; a page of every experiment, as its report wrote it; a page of every method with its docstring,
its options, what it was checked against and its results; the Python interface from its docstrings, by
pdoc; and how to add a result. Nothing on a page asks another host for anything.
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
from kvbench.errors.options import allowed, hints_of
from kvbench.records.durable import make_folder
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
)
"""The modules of the reference: what Python code of a user's calls, derives from or reads."""


@dataclass(frozen=True)
class MethodPage:
    """What the page of a method shows.

    Attributes:
        name: as on the command line. about: one line. doc: of its class. options: a row each with name,
            default and what is allowed. checked: what it was checked against. paper: as text.
        results: a row for each experiment, task, model and rate, with interval, prompts and ratio.
    """

    name: str
    about: str
    doc: str
    options: Sequence[Mapping[str, str]]
    checked: str
    paper: str
    results: Sequence[Mapping[str, str]]


def build_site(out: Path, folders: Sequence[Path], *, reference: bool = True) -> Path:
    """Write the site; returns its index.

    Args:
        out: the folder, whose earlier content is replaced; it may be empty, absent or an earlier site.
        folders: experiments, each with its report.
        reference: also the Python interface, which pdoc makes.

    Raises:
        StoreError: no folder has a report, `out` holds something else, or pdoc is not installed.
    """
    with_report = [folder for folder in folders if (folder / PAGE).is_file()]
    if not with_report:
        named = ", ".join(map(str, folders))
        raise StoreError(f"no reports in {named:.200}; expected {PAGE} in each")
    if out.exists() and any(out.iterdir()) and not (out / ".kvbench-site").is_file():
        raise StoreError(f"{out} holds other files; allowed: a new folder, or one of --site")
    shutil.rmtree(out, ignore_errors=True)
    make_folder(out, out.absolute().parent)
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
    """An experiment's page with its tables and pictures, where they are written."""
    target.mkdir(parents=True)
    shutil.copy(folder / PAGE, target)
    for kind, pattern in (("tables", "*.csv"), ("figures", "*.png")):
        for file in sorted((folder / kind).glob(pattern)):
            (target / kind).mkdir(exist_ok=True)
            shutil.copy(file, target / kind)


def method_pages(folders: Sequence[Path]) -> list[MethodPage]:
    """A page of every method of conf/method, sorted by name."""
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
    """A method's YAML with those that it begins with."""
    config = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    inherited: dict[str, Any] = {}
    for base in config.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            inherited |= _composed(folder, base.partition("@")[0])
    return inherited | config


def _options(kind: Any, config: Mapping[str, Any]) -> list[dict[str, str]]:
    """Name, value (the YAML's, else the class's) and what is allowed of every option."""
    hints = hints_of(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    return [
        {
            "name": name,
            "value": str(config.get(name, defaults[name])),
            "allowed": allowed(hint),
        }
        for name, hint in hints.items()
    ]


@cache
def _checked_rows() -> Mapping[str, Mapping[str, str]]:
    """By method its row of the table in kvbench/methods/README.md, without Markdown's marks."""
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
    """Scores of every variant in the tables that reports wrote, with the variant's measured ratio."""
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
    """The cells of a result."""
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
    """The pages that pdoc makes of `INTERFACE`."""
    try:
        import pdoc
    except ModuleNotFoundError as error:
        raise StoreError("--site: " + needs_extra("pdoc", "site")) from error
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*INTERFACE, output_directory=folder)


def _write(path: Path, kind: str, title: str, **values: Any) -> None:
    """A page of the site, from the block of its kind in the template; every value is escaped."""
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
