"""kvbench.load: records as a frame whose columns are documented, and as parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.report_runs import write_demo

import kvbench
from kvbench.records.read import COMMON_FIELDS, StoreError, load_runs
from kvbench.report.frame import COLUMNS


def test_records_are_a_frame_with_documented_columns_and_parquet(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv"), ("longeval_lines", "needle"))
    frame = kvbench.load(folder)
    assert list(frame.columns[: len(COLUMNS)]) == list(COLUMNS)
    assert set(COMMON_FIELDS) - set(COLUMNS) == {"entries"}
    runs = load_runs(folder)
    assert len(frame) == sum(len(run.records) for run in runs)
    snapkv = frame[(frame["method"] == "snapkv") & (frame["task"] == "needle")]
    assert snapkv["score"].mean() == pytest.approx(
        next(r for r in runs if r.folder.name.startswith("snapkv") and "needle" in str(r.folder))
        .records["score"]
        .mean()
    )
    assert snapkv["entries_mean"].notna().all()
    frame.to_parquet(tmp_path / "records.parquet")
    again = pd.read_parquet(tmp_path / "records.parquet")
    assert list(again.columns) == list(frame.columns)
    np.testing.assert_array_equal(again["score"], frame["score"])
    assert list(again["answers"][0]) == frame["answers"][0]


def test_one_run_and_several_experiments_are_read_alike(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv"), ("needle",))
    run = load_runs(folder)[0]
    assert len(kvbench.load(run.folder)) == len(run.records)
    assert len(kvbench.load(tmp_path)) == len(kvbench.load(folder))
    with pytest.raises(StoreError, match="does not exist"):
        kvbench.load(tmp_path / "nowhere")
