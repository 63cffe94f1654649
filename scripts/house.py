"""How large the house is: lines by room beside the room's budget, and what each room imports.

python scripts/house.py     (make lint prints it; it fails where a room is 10 % over its budget)
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvbench"

BUDGETS = {
    "api kv errors": 1_000,
    "kernels": 3_900,
    "methods": 3_700,
    "engine": 5_200,
    "tasks": 4_200,
    "probes": 1_500,
    "run records": 2_200,
    "report": 4_000,
    "cli": 1_200,
    "lm_eval": 600,
    "kvbench": 27_000,
    "tests": 16_000,
}
"""Lines of Python for the parts of kvbench/ named together; then for the package and the tests."""


def lines_of(path: Path) -> int:
    """Lines of a Python file, or of all below a folder."""
    files = path.rglob("*.py") if path.is_dir() else path.parent.glob(f"{path.name}.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def counted() -> dict[str, int]:
    """Lines of what each budget is for."""
    whole = {"kvbench": lines_of(PACKAGE), "tests": lines_of(ROOT / "tests")}
    parts = {room: sum(lines_of(PACKAGE / part) for part in room.split()) for room in BUDGETS}
    return parts | whole


def arrows() -> dict[str, set[str]]:
    """The parts of the package that each part imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found[part] |= {n.split(".")[1] for n in names if n.startswith("kvbench.")} - {part}
    return found


def main() -> None:
    """Print the table; exit with status 1 where a budget is exceeded by more than a tenth."""
    over = []
    graph = arrows()
    for room, lines in counted().items():
        targets = sorted({target for part in room.split() for target in graph.get(part, ())})
        share = lines / BUDGETS[room]
        print(f"{room:14} {lines:6,} of {BUDGETS[room]:6,} {share:5.0%}  -> {' '.join(targets)}")
        allowed = BUDGETS[room] * 11 // 10
        if lines > allowed:
            over.append(f"{room} has {lines:,} lines; allowed: {allowed:,}")
    if over:
        sys.exit("; ".join(over))


if __name__ == "__main__":
    main()
