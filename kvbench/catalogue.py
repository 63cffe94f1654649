"""The methods, models, tasks and experiments that there are to choose from: the YAML files of conf/."""

from __future__ import annotations

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
    """The first sentence of the comment that a YAML begins with."""
    comments = re.findall(r"\A(?:#.*\n)*", path.read_text(encoding="utf-8"))[0]
    lines = [line.lstrip("# ") for line in comments.splitlines()]
    text = " ".join(x for x in lines if not x.startswith(("@package", "python -m", "kvbench ")))
    # up to a full stop that is not the one of "3.1" or "G. Kamradt"
    sentence = re.match(r".*?(?<!\b[A-Z])\.(?=\s|$)", text)
    return (sentence[0] if sentence else text).strip().rstrip(".:")
