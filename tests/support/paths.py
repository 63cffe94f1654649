"""What tests of longbench run and others share."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "longbench"


ROOT = Path(__file__).parents[2]
