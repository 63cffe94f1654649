"""How large the house is: lines by room, the arrows between rooms, and the files that grow too long.

python scripts/house.py       (make lint prints it at its end)
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "kvbench"
TESTS = PACKAGE.parent / "tests"
LONG = 300
"""Lines from which on a file is listed."""


def lines_of(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def room_of(path: Path) -> str:
    """The first part of a file's path in the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def arrows() -> dict[str, set[str]]:
    """Rooms that each room imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("kvbench.") and name.split(".")[1] != room_of(path):
                    found[room_of(path)].add(name.split(".")[1])
    return {room: targets - {"conf", "assets"} for room, targets in found.items()}


def main() -> None:
    """Print it."""
    rooms: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        rooms[room_of(path)] += lines_of(path)
    graph = arrows()
    print(
        f"kvbench: {sum(rooms.values()):,} lines; tests: {sum(map(lines_of, TESTS.rglob('*.py'))):,}"
    )
    for room, count in rooms.most_common():
        print(f"  {room:10} {count:6,}  -> {' '.join(sorted(graph.get(room, ())))}")
    long = sorted(((lines_of(p), p) for p in PACKAGE.rglob("*.py")), reverse=True)
    listed = [f"{p.relative_to(PACKAGE)} {n}" for n, p in long if n > LONG]
    print(f"files over {LONG} lines: {', '.join(listed)}")


if __name__ == "__main__":
    main()
