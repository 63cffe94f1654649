"""Times: medians between order statistics, per token, by length, with what failed counted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.report_runs import THROUGHPUT_META, throughput_records, write_run
from support.tables import frame, heads, shown

from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.scores import score_table
from kvbench.report.tables.timings import decoding_table, median_of, timing_table, timings_of


def chance(n: int, k: int) -> float:
    """That the k-th smallest and the k-th largest of n lie on either side of the median."""
    return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n


@pytest.mark.parametrize("n", [6, 7, 9, 10, 11, 16, 25, 40])
def test_the_interval_of_a_median_is_the_narrowest_that_is_sure(n: int) -> None:
    values = pd.Series(np.random.default_rng(n).permutation(n) + 1.0)
    found = median_of(values)
    k = int(found.low)
    assert found.high == n + 1 - k
    assert found.value == (n + 1) / 2
    assert chance(n, k) >= 0.95 > chance(n, k + 1)
    if n == 10:
        assert (found.low, found.high) == (2, 9), "the second and the ninth"


def test_few_times_have_a_median_and_no_interval() -> None:
    found = median_of(pd.Series([3.0, 1.0, 2.0, 5.0, 4.0, None]))
    assert found.value == 3
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert math.isnan(median_of(pd.Series([], dtype=float)).value)


def test_runs_that_failed_are_counted_and_not_timed(tmp_path: Path) -> None:
    speedups = [1.2, 9.0, 1.0, 1.1, 0.9, 1.3, 1.4]
    records = [
        dict(throughput_records("snapkv")[0]) | {"example_id": f"run-{i}", "run": i, "speedup": x}
        for i, x in enumerate(speedups)
    ]
    for i in (7, 8):
        failed = {"status": "oom", "score": None, "error": "out of memory", "decode_s": None}
        records.append(dict(records[0]) | failed | {"example_id": f"run-{i}", "speedup": None})
    write_run(tmp_path, method="snapkv", records=records, task_meta=THROUGHPUT_META)
    (group,) = load_experiment(tmp_path / "demo").groups
    (timing,) = timings_of(group)
    assert (timing.runs, dict(timing.failures)) == (7, {"oom": 2})
    speedup = timing.estimate("tokens_per_s_over_exact")
    assert (speedup.value, speedup.low, speedup.high) == (1.2, 0.9, 9.0)
    table = timing_table(group)
    row = dict(zip(heads(table), shown(table)[0], strict=True))
    assert row["tokens/s x"] == "1.20 [0.900, 9.00]"
    assert (row["runs"], row["failed"]) == ("7", "2 oom")
    assert frame(table)["tokens_per_s_over_exact_low"][0] == 0.9


def answers(method: str, tokens: int, ms: float, lengths: tuple[int, ...], count: int = 8) -> list:
    """Answers of so many tokens at so many milliseconds a step, twice that for each doubling."""
    return [
        {
            "example_id": f"n{n}-{i}",
            "prompt_tokens": n,
            "new_tokens": tokens,
            "decode_s": (tokens - 1) * ms * (n / lengths[0]) * (1 + 0.01 * i) / 1000,
            "score": 1.0,
            "ratio": 0.25,
            "num_lines": n,
        }
        for n in lengths
        for i in range(count)
    ]


def test_longer_answers_are_not_slower_tokens(tmp_path: Path) -> None:
    """A method that says 48 tokens where another says 30 takes longer, not longer per token."""
    lengths = (100, 200, 400)
    for method, tokens, ms in (("exact", 30, 1.2), ("snapkv", 48, 0.9)):
        records = answers(method, tokens, ms, lengths)
        if method == "snapkv":
            records[-1] |= {"status": "oom", "score": None, "decode_s": None, "new_tokens": None}
        write_run(tmp_path, task="lines", method=method, records=records)
    (group,) = load_experiment(tmp_path / "demo").groups
    exact, snapkv = score_table(group).rows
    assert snapkv.costs["decode_s"] > exact.costs["decode_s"]
    assert snapkv.costs["decode_ms_per_token"] < exact.costs["decode_ms_per_token"]
    table = decoding_table(group)
    assert table is not None
    speeds = [row.values for row in table.rows]
    keys = ("variant", "prompt_tokens_from", "prompt_tokens_below", "timed")
    assert [tuple(s[key] for key in keys) for s in speeds] == [
        ("exact", 64, 128, 8), ("snapkv", 64, 128, 8), ("exact", 128, 256, 8),
        ("snapkv", 128, 256, 8), ("exact", 256, 512, 8), ("snapkv", 256, 512, 7),
    ]  # fmt: skip
    for speed in speeds:
        step = {"exact": 1.2, "snapkv": 0.9}[speed["variant"]] * speed["prompt_tokens_from"] / 64
        ms = speed["decode_ms_per_token"]
        assert 0.999 * step < ms.low < ms.value < ms.high
        if speed["variant"] == "snapkv":
            ratio = speed["over_baseline"]
            assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.75, 0.75, 0.75))
    assert dict(speeds[-1]["failures"]) == {"oom": 1}
    rows = shown(table)
    assert rows[-1][1] == "256–511"
    assert rows[-1][-2:] == ["7", "1 oom"]
    assert rows[0][4] == "–", "the baseline is not compared with itself"
    assert len(frame(table)) == 6
    paths = build_report(tmp_path / "demo")
    assert "lines-recall_mini-decoding.csv" in {path.name for path in paths.tables}
    page = paths.page.read_text()
    assert "decode ms/token" in page
    assert "decoding per token, by length of the prompt" in page


def test_a_question_read_after_compression_is_a_step_of_decoding(tmp_path: Path) -> None:
    for compress_after, steps in (("prompt", 7), ("context", 8)):
        folder = tmp_path / compress_after
        record = {
            "example_id": "a",
            "prompt_tokens": 64,
            "new_tokens": 8,
            "decode_s": 0.056,
            "score": 1.0,
        }
        options = {"compress_after": compress_after}
        write_run(folder, method="snapkv", records=[record], options=options)
        (group,) = load_experiment(folder / "demo").groups
        assert group.records["decode_ms"].tolist() == pytest.approx([56 / steps])
