"""How large kvbench is: lines of every package beside what the design has in mind, and its imports.

    python scripts/house.py

`make lint` ends with it. It is information, and fails nothing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvbench"

DESIGN = {
    "api kv errors": 1_100,
    "kernels": 4_500,
    "methods": 4_200,
    "engine": 6_000,
    "tasks": 4_300,
    "probes": 1_600,
    "run records": 2_450,
    "report": 4_800,
    "cli": 1_350,
    "lm_eval": 660,
    "kvbench": 31_000,
    "tests": 19_000,
}
"""About how many lines of Python the design has for the parts of kvbench/ named together, for the whole
package and for the tests."""


def lines_of(path: Path) -> int:
    """Lines of a Python file, or of all below a folder."""
    files = path.rglob("*.py") if path.is_dir() else path.parent.glob(f"{path.name}.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def count_lines() -> dict[str, int]:
    """Lines of each entry of `DESIGN`."""
    counts = {room: sum(lines_of(PACKAGE / part) for part in room.split()) for room in DESIGN}
    return counts | {"kvbench": lines_of(PACKAGE), "tests": lines_of(ROOT / "tests")}


def imports_by_part() -> dict[str, set[str]]:
    """The parts of the package that each part imports."""
    imports: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            targets = {name.split(".")[1] for name in names if name.startswith("kvbench.")}
            imports[part] |= targets - {part}
    return imports


def main() -> None:
    """Print the table."""
    imports = imports_by_part()
    for room, lines in count_lines().items():
        targets = sorted({target for part in room.split() for target in imports.get(part, ())})
        print(f"{room:14} {lines:6,} (about {DESIGN[room]:6,})  imports {' '.join(targets)}")


if __name__ == "__main__":
    main()
