"""scripts/recall_mini/force_needle.py on one short prompt of the shipped model."""

from __future__ import annotations

import csv
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "recall_mini"


def test_one_layer_copies_the_needle(monkeypatch, tmp_path):
    """The span at that layer alone is enough, and everywhere else it is not."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from force_needle import main

    main(["--lengths", "400", "--depths", "50", "--out", str(tmp_path / "found.csv")])
    rows = list(csv.DictReader((tmp_path / "found.csv").open()))
    assert {row["n"] for row in rows} == {"1"}
    contained = {row["variant"]: float(row["containment"]) for row in rows}
    assert contained["exact"] == 1.0
    assert contained["snapkv, kernel_size 5"] == 0.0
    assert contained["snapkv, needle kept at layer 1 alone"] == 1.0
    assert contained["snapkv, needle kept at all layers but 1"] == 0.0
    assert contained["snapkv, needle kept at all layers"] == 1.0
