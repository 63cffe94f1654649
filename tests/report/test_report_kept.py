"""What each method kept: on the page, in a file, and nothing from records that say nonsense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.report_runs import HOSTILE, TASKS, lines_records, write_run

from kvbench.report.build import build_report
from kvbench.report.experiment import Group, load_experiment
from kvbench.report.figures.kept import Strip, kept_figures, strip_of

METHODS = ("exact", "snapkv", "uniform")
KEPT: dict[str, Any] = {
    "tokens": 10,
    "width": 3,
    "layers": {"0": [100, 0, 50, 300], "1": [0, 0, 150, 100]},
    "texts": ["one two\n", HOSTILE, " three", "."],
    "answer": [4, 8],
    "unplaced": 0.0,
}


def written(results: Path, kept: Any = KEPT, methods: tuple[str, ...] = METHODS) -> Path:
    for method in methods:
        records = lines_records(method)
        for i, record in enumerate(records[:2]):
            record["kept"] = kept if i else {**KEPT, "layers": {"0": [9, 9, 9, 9]}}
        write_run(
            results, task="longeval_lines", method=method, records=records,
            task_meta=TASKS["longeval_lines"][1],
        )  # fmt: skip
    return results / "demo"


def group_of(folder: Path) -> Group:
    return load_experiment(folder).groups[0]


def test_the_page_shows_strips_that_say_their_text_and_mark_the_answer(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (drawn,) = kept_figures(group_of(folder))
    assert drawn.caption.startswith("Example lines-20-001.")
    assert "Marked: where the answer stands" in drawn.caption
    # pieces 1 and 2 of both layers: 0 and 0.5, 0 and 1.5
    assert drawn.finding == (
        "Weight held per token where the answer stands, mean over layers: uniform 0.50, snapkv 0.50."
    )
    report = build_report(folder)
    page = report.page.read_text()
    section = page.partition("What each method kept of one example")[2].partition("</details>")[0]
    assert section.count("<svg") == 1
    spots = section.count('class="spot"')
    assert spots == 2 * 4  # exact keeps everything, and is not drawn
    assert "<title>snapkv: tokens 0–2 “one two”: ×0.50</title>" in section
    assert "tokens 6–8 “three”, the answer: ×1.00" in section
    assert "<script>document.title" not in page
    assert "&lt;script&gt;" in section
    assert len(section) < 30_000
    assert {path.name for path in folder.glob("figures/kept-*")} >= {
        "kept-longeval_lines-recall_mini.png"
    } or not list(folder.glob("figures/*"))


def test_a_strip_keeps_its_weight_in_fewer_pieces() -> None:
    rng = np.random.default_rng(0)
    layers = {layer: rng.random(103) for layer in (0, 5)}
    strip = Strip(1022, 10, layers, [f"<{i}>" for i in range(103)], (500, 520))
    small = strip.coarser(16)
    assert (small.width, len(small.layers[0]), len(small.texts)) == (70, 15, 15)
    assert "".join(small.texts) == "".join(strip.texts)
    sizes = [
        np.minimum(s.width, 1022 - s.width * np.arange(len(s.layers[5]))) for s in (strip, small)
    ]
    held = [
        float((s.layers[5] * size).sum()) for s, size in zip((strip, small), sizes, strict=True)
    ]
    assert held[0] == pytest.approx(held[1])
    assert strip.coarser(200) is strip


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"tokens": "ten"},
        {"tokens": 10**12},
        {"width": 0},
        {"width": 1},
        {"layers": {}},
        {"layers": [1]},
        {"layers": {"0": [1, 2, 3]}},
        {"layers": {"0": [1, 2, 3, float("nan")]}},
        {"layers": {"0": [1, 2, 3, -1]}},
        {"layers": {"0": [1, 2, 3, "4"]}},
        {"layers": {"zero": [1, 2, 3, 4]}},
    ],
)
def test_what_no_kvbench_wrote_is_not_drawn(change: dict[str, Any], tmp_path: Path) -> None:
    assert strip_of(KEPT | change) is None
    if "tokens" in change:
        folder = written(tmp_path, KEPT | change, ("snapkv",))
        (drawn,) = kept_figures(group_of(folder))
        assert drawn.caption.startswith("Example lines-10-000.")


def test_what_is_beside_the_strips_may_be_missing_or_wrong() -> None:
    for change in (
        {"texts": None, "answer": None, "unplaced": None},
        {"texts": [1, 2, 3, 4], "answer": [8, 4], "unplaced": 7},
        {"texts": ["a"], "answer": [0, 99], "unplaced": "x"},
        {"texts": "abcd", "answer": "48", "unplaced": float("nan")},
    ):
        strip = strip_of(KEPT | change)
        assert strip is not None
        assert (strip.texts, strip.answer, strip.unplaced) == ((), None, 0.0)
    for nothing in (None, float("nan"), "kept", [1]):
        assert strip_of(nothing) is None


def test_records_that_say_nothing_have_no_figure(tmp_path: Path) -> None:
    write_run(
        tmp_path, task="longeval_lines", method="snapkv", records=lines_records("snapkv"),
        task_meta=TASKS["longeval_lines"][1],
    )  # fmt: skip
    assert kept_figures(group_of(tmp_path / "demo")) == []
