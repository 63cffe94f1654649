"""Two experiments compared: matching, pairing, what changed, the files and the command."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.page import Page
from support.report_runs import HOSTILE, write_run
from support.tables import bold, frame, heads, shown

from kvbench.records.read import StoreError
from kvbench.report.__main__ import main
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.change_tables import change_tables, every_change
from kvbench.report.tables.compare import Comparison, compare


def records_of(scores: Sequence[float | None], **fields: Any) -> list[dict[str, Any]]:
    return [
        {
            "example_id": f"e{i}",
            "score": score,
            "status": "oom" if score is None else "ok",
            "prediction": f"answer {score}",
            "ratio": 0.25,
            "compress_s": 0.5,
            "decode_s": 1.0,
        }
        | fields
        for i, score in enumerate(scores)
    ]


def write(folder: Path, methods: Mapping[str, Sequence[float | None]], **options: Any) -> Path:
    fields = options.pop("fields", {})
    for method, scores in methods.items():
        records = records_of(scores, **fields)
        write_run(folder, method=method, records=records, **options)
    return folder / "demo"


def compared(first: Path, second: Path) -> Comparison:
    return compare(load_experiment(first), load_experiment(second))


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """snapkv got better, h2o is as it was, uniform is new, topk is gone."""
    rng = np.random.default_rng(0)
    before = rng.random(80) * 0.5
    after = before + rng.normal(0.1, 0.05, 80)
    a = write(tmp_path / "a", {"snapkv": list(before), "h2o": [1, 0, None, 1], "topk": [1.0]})
    b = write(
        tmp_path / "b",
        {"snapkv": list(after), "h2o": [1, None, 1, 1], "uniform": [1.0]},
        options={"budget.rate": 0.5},
    )
    return a, b


def test_the_same_examples_are_paired(both: tuple[Path, Path]) -> None:
    (task,) = compared(*both).tasks
    snapkv = next(match for match in task.matches if match.method == "snapkv").total
    scores = [load_experiment(path).groups[0].records for path in both]
    before, after = (r[r["method"] == "snapkv"]["score"].to_numpy() for r in scores)
    assert snapkv.paired
    assert snapkv.common_examples == 80
    assert snapkv.first.value == pytest.approx(before.mean())
    assert snapkv.second.value == pytest.approx(after.mean())
    assert snapkv.difference.value == pytest.approx((after - before).mean())
    error = (after - before).std(ddof=1) / math.sqrt(80)
    assert snapkv.difference.high - snapkv.difference.low == pytest.approx(3.92 * error, rel=0.1)
    assert snapkv.p_holm < 0.001
    assert (snapkv.better, snapkv.worse) == ((after > before).sum(), (after < before).sum())
    assert snapkv.ratio == (0.25, 0.25)
    assert snapkv.seconds == (1.5, 1.5)


def test_only_what_both_scored_enters_a_difference(both: tuple[Path, Path]) -> None:
    (task,) = compared(*both).tasks
    h2o = next(match for match in task.matches if match.method == "h2o")
    assert h2o.total.common_examples == 2  # the first and the last
    assert h2o.total.difference.value == 0
    assert h2o.total.failed == ({"oom": 1}, {"oom": 1})
    assert h2o.flips == ()


def test_what_one_lacks_and_what_changed_is_told(both: tuple[Path, Path]) -> None:
    found = compared(*both)
    assert found.names == ("a/demo", "b/demo")
    assert found.only == (("recall_mini / t / topk",), ("recall_mini / t / uniform",))
    settings = {setting.key: setting for setting in found.settings}
    assert settings["budget.rate"].everywhere
    assert (settings["budget.rate"].first, settings["budget.rate"].second) == ("0.25", "0.5")
    assert "code_revision" not in settings
    texts = [view.title for view in change_tables(found)]
    assert texts == ["What changed in the runs that both have", "t on recall_mini: score, %"]


def test_other_prompts_are_other_examples(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"snapkv": [1.0, 1.0, 0.0, 1.0]})
    b = write(
        tmp_path / "b", {"snapkv": [0.0, 0.0, 1.0, 0.0]}, fields={"prompt_tail": "another one"}
    )
    change = compared(a, b).tasks[0].matches[0].total
    assert not change.paired
    assert change.common_examples == 0
    assert change.difference.value == pytest.approx(-0.5)
    assert math.isnan(change.p)
    view = change_tables(compared(a, b))[-1]
    assert shown(view)[0][3].endswith(" *")
    assert any(note.startswith("* unpaired") for note in view.notes)


def test_an_unpaired_interval_is_that_of_two_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    one, other = rng.random(60), rng.random(90) + 0.2
    a = write(tmp_path / "a", {"snapkv": list(one)})
    b = write(tmp_path / "b", {"snapkv": list(other)}, fields={"prompt_tail": "another one"})
    difference = compared(a, b).tasks[0].matches[0].total.difference
    error = math.sqrt(one.var() / 60 + other.var() / 90)
    assert difference.high - difference.low == pytest.approx(3.92 * error, rel=0.06)


def test_a_seed_of_draws_alone_does_not_part_examples(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"snapkv": [1.0, 0.0]}, seed=0)
    b = write(tmp_path / "b", {"snapkv": [1.0, 1.0]}, seed=1)
    found = compared(a, b)
    assert found.tasks[0].matches[0].total.common_examples == 2
    assert {"seed"} <= {setting.key for setting in found.settings}


def test_one_shared_example_pairs_nothing(tmp_path: Path) -> None:
    """Of forty examples each, one has the same prompt: the means are those of two samples."""
    rng = np.random.default_rng(6)
    sides = []
    for name, level in (("a", 0.5), ("b", 0.7)):
        records = records_of([float(x) for x in rng.random(40) < level])
        for i, record in enumerate(records):
            record["prompt_tail"] = "shared" if i == 0 else f"{name} {i}"
        write_run(tmp_path / name, method="x", records=records)
        sides.append(np.array([record["score"] for record in records]))
    change = compared(tmp_path / "a" / "demo", tmp_path / "b" / "demo").tasks[0].matches[0].total
    assert not change.paired
    assert change.common_examples == 1
    assert math.isnan(change.p)
    assert change.difference.value == pytest.approx(sides[1].mean() - sides[0].mean())
    assert change.difference.high - change.difference.low > 0.3


def test_half_of_the_smaller_side_is_enough_to_pair(tmp_path: Path) -> None:
    """Twenty of the hundred examples were run before."""
    scores = [float(i % 3 > 0) for i in range(100)]
    a = write(tmp_path / "a", {"snapkv": scores[:20]})
    b = write(tmp_path / "b", {"snapkv": scores})
    change = compared(a, b).tasks[0].matches[0].total
    assert change.paired
    assert (change.common_examples, change.difference.value) == (20, 0.0)


def test_repeats_under_seeds_the_other_lacks_are_averaged(tmp_path: Path) -> None:
    """Seeds 0 and 1 of the same prompts against seed 2: each example's mean counts, not its first."""
    a = write(tmp_path / "a", {"snapkv": [1.0, 0.0, 1.0, 0.0]}, seed=0)
    write(tmp_path / "a", {"snapkv": [0.0, 0.0, 1.0, 1.0]}, seed=1)
    b = write(tmp_path / "b", {"snapkv": [1.0, 1.0, 1.0, 1.0]}, seed=2)
    change = compared(a, b).tasks[0].matches[0].total
    assert change.common_examples == 4
    assert change.first.value == pytest.approx(0.5)
    assert change.difference.value == pytest.approx(0.5)
    assert (change.better, change.worse) == (3, 0)


def test_a_change_is_bold_where_its_test_shows_it(tmp_path: Path) -> None:
    """Five of forty better and none worse has p = .0625, six .031: McNemar's exact test."""
    for wins, shown_worse in ((5, False), (6, True)):
        before = [0.0] * wins + [1.0, 0.0] * 17
        after = [1.0] * wins + [1.0, 0.0] * 17
        a = write(tmp_path / f"a{wins}", {"snapkv": before})
        b = write(tmp_path / f"b{wins}", {"snapkv": after})
        found = compared(a, b)
        assert found.tasks[0].matches[0].total.p == pytest.approx(2 * 0.5**wins)
        assert bold(change_tables(found)[-1]) == ({(0, 3)} if shown_worse else set())


def test_datasets_count_alike_and_each_is_shown(tmp_path: Path) -> None:
    for name, by in (("a", 0.0), ("b", 0.1)):
        records = [
            {"example_id": f"{d}{i}", "dataset": d, "score": s + by * (d == "lcc"), "status": "ok"}
            for d, s, n in (("lcc", 0.5, 3), ("trec", 0.2, 9))
            for i in range(n)
        ]
        write_run(tmp_path / name, method="x", records=records)
    found = compared(tmp_path / "a" / "demo", tmp_path / "b" / "demo")
    changes = found.tasks[0].matches[0].changes
    assert [change.dataset for change in changes] == ["lcc", "trec", "average"]
    assert changes[-1].difference.value == pytest.approx(0.05)
    assert heads(change_tables(found)[-1]) == ["method", "lcc", "trec", "average"]
    lines = frame(every_change(found.tasks[0]))
    assert list(lines["difference"].round(6)) == [10.0, 0.0, 5.0]  # per cent
    for name in ("first", "second", "difference"):
        for suffix, part in (("", "value"), ("_low", "low"), ("_high", "high")):
            want = [100 * getattr(getattr(change, name), part) for change in changes]
            assert list(lines[name + suffix]) == pytest.approx(want)


def test_two_models_are_compared_where_each_folder_has_one(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"snapkv": [1.0]}, model="Llama")
    b = write(tmp_path / "b", {"snapkv": [1.0]}, model="Qwen")
    assert compared(a, b).tasks[0].model == "Llama → Qwen"
    write(tmp_path / "b", {"snapkv": [1.0]}, model="Gemma")
    with pytest.raises(StoreError, match="no model, task and method in common"):
        compared(a, b)


def test_nothing_in_common_is_one_line(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"snapkv": [1.0]})
    b = write(tmp_path / "b", {"h2o": [1.0]})
    with pytest.raises(StoreError, match="no model, task and method in common"):
        compared(a, b)


def test_the_command_prints_and_writes(
    both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*map(str, both), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "snapkv" in said
    assert "budget.rate" in said
    assert "only in a/demo: 1 runs" in said
    assert said.splitlines()[-1] == str(out / "compare.csv")
    assert {path.name for path in out.iterdir()} == {"compare.html", "compare.md", "compare.csv"}
    assert len(pd.read_csv(out / "compare.csv")) == 2
    assert "| method" in (out / "compare.md").read_text()
    page = (out / "compare.html").read_text()
    assert "Answers whose score changed" in page
    first = page
    assert main([*map(str, both), "--out", str(out)]) == 0
    assert (out / "compare.html").read_text() == first


def test_answers_stay_text(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"snapkv": [1.0]})
    b = write(tmp_path / "b", {"snapkv": [0.0]}, fields={"prediction": HOSTILE})
    assert main([str(a), str(b), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "compare.html").read_text()
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text
    page = Page(text)
    assert (len(page.scripts), page.handlers, page.fetched) == (1, [], [])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere", "{a}"], 1, "no results in nowhere: the folder does not exist"),
        (["{a}", "nowhere"], 1, "no results in nowhere: the folder does not exist"),
        (["{a}", "{a}", "nowhere"], 1, "no results in nowhere: the folder does not exist"),
        ([], 2, "the following arguments are required: folder"),
        (["{a}", "--out", "x"], 2, "--out is for a comparison of two folders"),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    a = str(write(tmp_path / "a", {"snapkv": [1.0]}))
    words = [a if word == "{a}" else word for word in arguments]
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvbench-report: ")
    assert message in line


def test_the_module_is_the_command_and_needs_no_torch(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    script = (
        "import sys\nfrom kvbench.report.__main__ import main\n"
        f"assert main([{str(both[0])!r}, {str(both[1])!r}, '--out', {str(tmp_path / 'o')!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'wandb'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.report", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "usage: kvbench-report" in done.stdout
