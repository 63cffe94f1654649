"""Files of data as benchmarks publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
