"""Run the code cells of a notebook in order and keep what they print: no Jupyter needed.

python scripts/execute_notebook.py scripts/quickstart.ipynb     # writes the outputs back
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def run_cell(source: str, namespace: dict[str, Any], name: str) -> list[Cell]:
    """Execute a cell; what it printed, and the value of its last expression, as outputs."""
    tree = ast.parse(source, filename=name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value: Any = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[Cell] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data: Cell = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "savefig"):  # a figure of matplotlib
            png = io.BytesIO()
            value.savefig(png, format="png", dpi=72, metadata={"Software": None})
            data["image/png"] = base64.b64encode(png.getvalue()).decode()
        elif hasattr(value, "_repr_html_"):
            data["text/html"] = str(value._repr_html_()).splitlines(keepends=True)
        outputs.append({"data": data, "metadata": {}, "output_type": "execute_result"})
    return outputs


def run_notebook(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook with fresh outputs, and the names its cells left behind."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        cell["execution_count"] = count
        cell["outputs"] = run_cell("".join(cell["source"]), namespace, f"cell {count}")
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count
    return notebook, namespace


def main(paths: list[str]) -> None:
    """Run each notebook and write it back."""
    for path in map(Path, paths):
        notebook, _ = run_notebook(path)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
