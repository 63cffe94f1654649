"""scripts/quickstart.ipynb runs from top to bottom, and is committed with what it printed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
NOTEBOOK = SCRIPTS / "quickstart.ipynb"


def executor() -> Any:
    """scripts/execute_notebook.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "execute_notebook", SCRIPTS / "execute_notebook.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_runs_and_shows_what_it_says() -> None:
    notebook, names = executor().run_notebook(NOTEBOOK)
    text = json.dumps(notebook)
    expected = names["example"].answers[0]
    assert f"expected: {expected}" in text
    assert "allowed: none, since compress brings its own cache" in text
    assert names["frame"].index.tolist() == list(names["variants"])
    assert len(names["session"].rows) == 5  # two prompts, two samples each; one stream
    assert '"image/png"' in text
    assert names["model"].config._attn_implementation != "kvbench"


def test_the_committed_outputs_are_complete_and_small() -> None:
    assert NOTEBOOK.stat().st_size < 45_000
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) - 2
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds == {"stream", "execute_result"}


def test_the_executor_keeps_prints_and_the_last_value() -> None:
    run_cell = executor().run_cell
    names: dict[str, Any] = {}
    printed, value = run_cell("x = 2\nprint('a')\nx + 1", names, "cell 1")
    assert printed["text"] == ["a\n"]
    assert value["data"]["text/plain"] == ["3"]
    assert run_cell("x", names, "cell 2")[0]["data"]["text/plain"] == ["2"]
    (figure,) = run_cell("from matplotlib.figure import Figure\nFigure()", {}, "cell 5")
    assert set(figure["data"]) == {"text/plain", "image/png"}
    assert run_cell("y = x", names, "cell 3") == run_cell("None", names, "cell 4") == []
