"""The shipped model is small and without pickles; `make results` measures what it finds."""

from __future__ import annotations

from support.paths import ROOT

ASSET = ROOT / "kvbench" / "assets" / "recall_mini"


def test_it_is_small_and_holds_no_pickles() -> None:
    assert sum(file.stat().st_size for file in ASSET.glob("*.safetensors")) <= 12e6
    assert {file.suffix for file in ASSET.iterdir()} <= {".safetensors", ".json", ".md"}
