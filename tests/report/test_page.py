"""The page, the files beside it, and the command that makes them."""

from __future__ import annotations

import json
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.report_runs import (
    HOSTILE,
    NEEDLE_META,
    lines_records,
    needle_records,
    write_demo,
    write_run,
)
from support.tables import group_of

from kvbench.report.__main__ import main
from kvbench.report.answers import sample_of
from kvbench.report.build import ReportPaths, build_report
from kvbench.report.page import write_index
from kvbench.report.wandb import main as wandb_main


class Parsed(HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts, self.handlers, self.fetched = 0, [], []  # type: ignore[var-annotated]
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        loads = {"src", "srcset", "action", "data"} | ({"href"} if tag == "link" else set())
        self.fetched += [str(value)[:30] for name, value in attributes if name in loads]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    methods = ("exact", "snapkv", "h2o")
    return build_report(write_demo(tmp_path_factory.mktemp("results"), methods), for_print=True)


def test_a_page_holds_everything_and_is_one_file(demo: ReportPaths) -> None:
    text = demo.page.read_text()
    parsed = Parsed(text)
    assert parsed.scripts == 1
    assert parsed.handlers == []
    assert HOSTILE not in text
    assert "owned" in text, "model output stays text"
    assert all(address.startswith("data:image/svg+xml") for address in parsed.fetched)
    assert len(text.encode()) < 2_000_000
    assert text.count("[low, high] is a 95 % interval") == 1, "footnotes stand once"
    told = json.loads((demo.page.parent / "summary.json").read_text())["recall_mini"]
    assert told["longeval_lines"]["snapkv"]["score"] == pytest.approx(0.72)
    assert set(told["longeval_lines"]["snapkv"]) == {"score", "low", "high", "n", "ratio"}
    needle = text.partition('<h2 id="section-2">')[2]
    folded = needle.index("<details")
    for open_ in ("needle: score against memory", "needle: score by length and depth", "<table"):
        assert needle.index(open_) < folded, "the ranking and the heatmap are not folded"
    assert max(map(len, re.findall('<p class="verdict">(.*?)</p>', text))) < 400
    for part in (
        '<h2 id="section-1">longeval_lines',
        "At rate 0.25: snapkv has 72.0 %",
        "longeval_lines on recall_mini at rate 0.25: score, %",
        "which compressed methods are shown to differ",
        "2 failed examples",
        " of 50 examples</summary>",
        "recall_mini: all tasks",
        "throughput on recall_mini: medians over runs",
        "0123abcd",
    ):
        assert part in text, part
    names = {path.name for path in demo.tables}
    stem = "longeval_lines-recall_mini"
    assert {f"{stem}.csv", f"{stem}.md", f"{stem}.tex", "overview-recall_mini.md"} <= names
    assert f"{stem}-ratio.pdf" in {path.name for path in demo.figures}


def test_the_same_records_give_the_same_files(tmp_path: Path) -> None:
    write_run(tmp_path, method="snapkv", records=needle_records("snapkv"), task_meta=NEEDLE_META)

    def build() -> dict[str, bytes]:
        paths = build_report(tmp_path / "demo")
        return {path.name: path.read_bytes() for path in (paths.page, *paths.tables)}

    assert build() == build()


def test_a_card_says_which_answers_are_not_the_baselines(tmp_path: Path) -> None:
    for method, said in (("exact", "it is 41077"), ("snapkv", "it was 41077")):
        record = {"example_id": "a", "score": 1.0, "prediction": said, "evidence": "line: 41077."}
        write_run(tmp_path, method=method, records=[record])
    (card,), _ = sample_of(group_of(tmp_path / "demo"))
    assert card.evidence == "line: 41077."
    other = next(answer for answer in card.answers if answer.label == "snapkv")
    assert (other.verdict, other.differs) == ("right", True)


def test_the_command_rebuilds_links_and_says_errors_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two", "three"):
        write_run(tmp_path, experiment=name, records=lines_records("exact")[:3])
    folders = [str(tmp_path / name) for name in ("one", "two", "three")]
    assert main([folders[0], "--list"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"{folders[0]}/report.html"
    assert len(out) > 5
    assert main(folders) == 0
    index = (tmp_path / "index.html").read_text()
    assert re.findall('href="([^"]*)"', index) == [
        f"{n}/report.html" for n in ("one", "two", "three")
    ]
    assert write_index([tmp_path / "one"]) == tmp_path / "index.html"
    capsys.readouterr()
    for words in (["--out", "x", folders[0]], ["--rescored", "x", *folders[:2]]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    for words in ([str(tmp_path / "nowhere")], [folders[0], str(tmp_path)], [*folders, "nowhere"]):
        assert main(words) == 1
        assert capsys.readouterr().err.count("\n") == 1


FORGED: list[tuple[str, Any]] = [
    ("task_meta.figures", [{"kind": "heatmap", "x": "length"}]),
    ("task_meta.figures", [{"kind": "heatmap", "x": "answers", "y": "depth"}]),
    ("task_meta.figures", [{"kind": "bars", "x": "answers"}]),
    (
        "task_meta.figures",
        [{"kind": "scaling", "x": "prediction", "y": "score", "level": "length"}],
    ),
    ("task_meta.breakdown", ["answers"]),
    ("task_meta.unit", "answers"),
    ("task_meta.measures", ["answers"]),
    ("config.paper_table", {"file": ["x"]}),
    ("config.differs", 5),
    ("config.budget", 5),
    ("config.logger", {"name": "wandb"}),
    ("record.context_id", 1e300),
    ("record.kept", {"tokens": "ten", "width": 0, "layers": [1]}),
    ("record.kept", {"tokens": 10**12, "width": 3, "layers": {"0": [float("nan"), -1]}}),
    ("record.length", {"a": [1]}),
]


@pytest.mark.parametrize(("place", "odd"), FORGED, ids=range(len(FORGED)))
def test_forged_records_and_manifests_are_a_page_or_one_line(
    tmp_path: Path, place: str, odd: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    part, _, key = place.partition(".")
    records = needle_records("snapkv")
    records[0] |= {key: odd} if part == "record" else {}
    meta = NEEDLE_META | ({key: odd} if part == "task_meta" else {})
    run = write_run(tmp_path, method="snapkv", records=records, task_meta=meta)
    if part == "config":
        made = json.loads((run / "manifest.json").read_text())
        made["config"][key] = odd
        (run / "manifest.json").write_text(json.dumps(made))
    for command in (main, wandb_main):
        with warnings.catch_warnings(action="error"):
            status = command([str(tmp_path / "demo")])
        assert status in (0, 1)
        said = capsys.readouterr().err
        assert said.count("\n") == (1 if ": warning: " in said else status)
