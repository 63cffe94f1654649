"""What there is to choose from, in one line each: ``kvbench list``.

Descriptions come from the comment at the top of a YAML in conf/, or, where it has none, from the
docstring of the class it names, read without importing it.
"""

from __future__ import annotations

import ast
import re
from importlib.resources import files
from pathlib import Path

KINDS = ("methods", "models", "tasks", "experiments", "loggers", "launchers")


def config_dir() -> Path:
    """The folder of the YAML files: the repository's conf/, which ships inside the package."""
    return Path(str(files("kvbench"))) / "conf"


def catalogue(kind: str) -> dict[str, str]:
    """Name and description of everything of a kind (one of `KINDS`), sorted by name."""
    folder = config_dir() / kind.removesuffix("s")
    return {path.stem: describe(path) for path in sorted(folder.glob("[!_]*.yaml"))}


def describe(path: Path) -> str:
    """One line about a YAML: its first sentence-like comment, or its class's docstring."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            break
        text = line.lstrip("#").strip()
        if not text.startswith(("@package", "python -m kvbench", "kvbench ")):
            comments.append(text)
    if comments:
        return _sentence(" ".join(comments))
    target = next((line for line in lines if line.startswith("_target_:")), "")
    return _docstring(target.partition(":")[2].strip())


def _sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence (not the one of "3.1" or "G. Kamradt")."""
    match = re.match(r".*?(?<!\b[A-Z])\.(?=\s|$)", text)
    return (match.group(0) if match else text).strip().rstrip(".:")


def _docstring(target: str) -> str:
    """First sentence of the docstring of the class ``package.module.Class``."""
    module, _, name = target.rpartition(".")
    source = Path(str(files("kvbench"))).parent / (module.replace(".", "/") + ".py")
    if not source.is_file():
        return ""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _sentence(" ".join((ast.get_docstring(node) or "").split()))
    return ""
