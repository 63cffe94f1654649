"""scripts/quickstart.ipynb runs from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.paths import ROOT

NOTEBOOK = ROOT / "scripts" / "quickstart.ipynb"
LAST = """
assert variants and frame.index.tolist() == list(variants)
assert len(session.rows) == 5  # two prompts, two samples each; one stream
assert model.config._attn_implementation != "kvbench"
print("expected:", example.answers[0])
"""


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook["cells"].append(nbformat.v4.new_code_cell(LAST))
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    *cells, last = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    text = json.dumps([cell["outputs"] for cell in cells])
    assert last["outputs"][0]["text"].strip() in text
    assert "which a compressed cache cannot serve; allowed" in text
    assert '"image/png"' in text
