"""The methods, models, tasks, experiments, loggers and launchers that a user can choose, which are the
YAML files of conf/, and a line about each."""

from __future__ import annotations

import ast
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

KINDS = ("methods", "models", "tasks", "experiments", "loggers", "launchers")
FOLDERS = ("", "papers", "parts")
"""The folders below conf/ with a folder of YAML files for each kind: what users choose from; papers'
experiments and the presets of methods; parts of other files. All are chosen by their names alone."""
TITLES = {
    "method": (
        "methods, with kvbench's defaults",
        "presets: a method with the options of a paper or of its released code",
    ),
    "task": ("benchmarks and probes", "tasks that one paper alone has"),
    "experiment": (
        "comparisons of our own: experiment=<name>",
        "tables and figures of papers: experiment=<name>, or kvbench reproduce <name>",
    ),
}
"""Titles for the files of conf/ and for those of conf/papers/, where a kind has both."""


def config_dir() -> Path:
    """The folder of the YAML files: the repository's conf/, which ships inside the package."""
    return Path(str(files("kvbench"))) / "conf"


def catalogue(kind: str) -> dict[str, str]:
    """The description of every choice of a kind, by its name, sorted.

    Args:
        kind: one of `KINDS`.
    """
    return {name: describe(path) for name, path in files_of(kind).items()}


def sections_of(kind: str) -> dict[str, dict[str, str]]:
    """`catalogue` by the title of the folder, which is empty where a kind has one folder."""
    titles = TITLES.get(kind.removesuffix("s"), ("", ""))
    sections: dict[str, dict[str, str]] = {title: {} for title in titles}
    for name, path in files_of(kind).items():
        sections[titles[path.parent.parent.name == "papers"]][name] = describe(path)
    return sections


def files_of(kind: str) -> dict[str, Path]:
    """The YAML file of every choice of a kind, by its name, sorted."""
    group = kind.removesuffix("s")
    paths = [path for folder in FOLDERS for path in (config_dir() / folder / group).glob("*.yaml")]
    return {
        path.stem: path for path in sorted(paths, key=lambda path: path.stem) if path.stem[0] != "_"
    }


def options_of_model(name: str) -> dict[str, Any]:
    """The options of a model of conf/, those of the files that it is based on included."""
    own = yaml.safe_load((config_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    options: dict[str, Any] = {}
    for base in own.pop("defaults", ()):
        if base != "_self_":
            options |= options_of_model(base)
    return options | own


def describe(path: Path) -> str:
    """The first sentence of the comment that a YAML file begins with, apart from commands in it; without
    a comment that of the docstring of its class."""
    yaml_text = path.read_text(encoding="utf-8")
    comments = re.findall(r"\A(?:#.*\n)*", yaml_text)[0]
    lines = [line.lstrip("# ") for line in comments.splitlines()]
    not_prose = ("@package", "python -m", "kvbench ")
    text = " ".join(line for line in lines if not line.startswith(not_prose))
    target = re.search(r"^_target_: *([\w.]+)", yaml_text, re.M)
    if not text and target:
        text = " ".join(_docstring(target[1]).split())
    # up to a full stop that is not the one of "3.1" or "G. Kamradt"
    sentence = re.match(r".*?(?<!\b[A-Z])\.(?=\s|$)", text)
    return (sentence[0] if sentence else text).strip().rstrip(".:")


def _docstring(target: str) -> str:
    """The docstring of the class with this dotted name, read from its file, since an import takes
    seconds; empty where there is none."""
    module, _, name = target.rpartition(".")
    roots = [str(files("kvbench").joinpath("..")), "", *sys.path]
    candidates = [Path(root, f"{module.replace('.', '/')}.py") for root in roots]
    file = next((file for file in candidates if file.is_file()), None)
    try:
        body = [] if file is None else ast.parse(file.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return ""
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    return (ast.get_docstring(classes[0]) or "") if classes else ""
