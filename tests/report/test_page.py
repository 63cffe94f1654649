"""The page, the files beside it, and the command that makes them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import warnings
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.golden_text import assert_golden, text_of
from support.report_runs import (
    HOSTILE,
    LINES_META,
    NEEDLE_META,
    error_records,
    lines_records,
    needle_records,
    write_demo,
    write_run,
)
from support.tables import group_of

from kvbench.records.read import StoreError
from kvbench.report.__main__ import main
from kvbench.report.build import ReportPaths, build_report
from kvbench.report.page import facts_of, how_to_reproduce, sample_of, write_index
from kvbench.report.runs import load_experiment
from kvbench.report.wandb import main as wandb_main


class Parsed(HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.data: list[str] = []
        self.handlers: list[str] = []
        self.fetched: list[str] = []
        self._target: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            is_data = ("type", "application/json") in attributes
            self._target = self.data if is_data else self.scripts
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        loads = {"src", "srcset", "action", "data"} | ({"href"} if tag == "link" else set())
        self.fetched += [str(value)[:30] for name, value in attributes if name in loads]

    def handle_data(self, data: str) -> None:
        if self._target is not None:
            self._target.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._target = None


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    methods = ("exact", "snapkv", "h2o")
    return build_report(write_demo(tmp_path_factory.mktemp("results"), methods), for_print=True)


def test_a_page_is_one_file_that_runs_its_own_scripts_alone(demo: ReportPaths) -> None:
    text = demo.page.read_text()
    parsed = Parsed(text)
    allowed = re.findall(r"'sha256-([^']*)'", text.partition("script-src")[2].partition('"')[0])
    digests = [hashlib.sha256(script.encode()).digest() for script in parsed.scripts]
    assert [base64.b64encode(one).decode() for one in digests] == allowed, "by hash, no other"
    assert "unsafe-eval" not in text.partition("<style>")[0]
    assert parsed.handlers == []
    assert HOSTILE not in text
    assert "owned" in text, "model output stays text"
    assert parsed.fetched == [], "figures stand in it"
    assert len(text.encode()) < 700_000


def test_what_a_page_says(demo: ReportPaths) -> None:
    """Its tasks, a probe, what is folded, failed examples, answers, how to reproduce."""
    assert_golden("page.txt", text_of(demo.page))


def test_a_page_has_its_files_beside_it(demo: ReportPaths) -> None:
    text, folder = demo.page.read_text(), demo.page.parent
    files = re.findall('href="(figures/.*?)"', text)
    assert "figures/needle-recall_mini-ratio.svg" in files
    svg = (folder / "figures/needle-recall_mini-ratio.svg").read_text()
    assert svg in text, "the file and what the page shows are one"
    for kind in ("svg", "png", "pdf"):
        assert all((folder / file).with_suffix(f".{kind}").is_file() for file in files)
    stem = "longeval_lines-recall_mini"
    names = {path.name for path in demo.tables}
    assert {f"{stem}.csv", f"{stem}.md", f"{stem}.tex", "overview-recall_mini.md"} <= names
    assert f"{stem}-ratio.pdf" in {path.name for path in demo.figures}
    summary = json.loads((folder / "summary.json").read_text())["recall_mini"]
    assert summary["longeval_lines"]["snapkv"]["score"] == pytest.approx(0.72)
    assert set(summary["longeval_lines"]["snapkv"]) == {"score", "low", "high", "n", "ratio"}


def test_what_was_kept_is_text_with_shades_and_the_answer_marked(tmp_path: Path) -> None:
    """40 pieces of two tokens: the first and the last are kept by both layers, the answer's by one."""
    halves = [100, *[0] * 38, 100]
    kept: dict[str, Any] = {"tokens": 80, "width": 2, "answer": [41, 43]}
    kept["texts"] = [f"\n<{i:02d}>{' and so on' * 4}" for i in range(40)]
    kept["layers"] = {"0": halves, "3": [*halves[:20], 100, *halves[21:]]}
    for method in ("exact", "snapkv"):
        record = {"example_id": "a", "score": 1.0, "kept": kept}
        write_run(tmp_path, method=method, records=[record])
    text = build_report(tmp_path / "demo").page.read_text()
    (block,) = re.findall('(?s)<div class="kept">.*?</details>', text)
    assert re.findall('class="who">.*?</span>(.*?)</div>', block) == ["snapkv"], "not exact"
    words = block.partition("<p>")[2]
    assert words.startswith('<span class="k9">↵ &lt;00&gt; and so on')
    marked = re.findall('<mark class="(..)">↵ &lt;(..)&gt; and', words)
    assert marked == [("k5", "20"), ("k0", "21")]
    assert "&lt;05&gt;" not in words, "only the ends and what is around the answer"
    assert words.count(" tokens …") == 2


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
    assert card["evidence"] == "line: 41077."
    other = next(answer for answer in card["answers"] if answer["label"] == "snapkv")
    assert (other["verdict"], other["differs"]) == ("right", True)


def test_answers_shown_are_of_every_dataset_and_all_of_a_small_one(tmp_path: Path) -> None:
    sizes = {"few": 3, "many": 40}
    records = [
        {"example_id": f"{dataset}-{i}", "dataset": dataset, "prediction": "?", "score": 0.0}
        for dataset, size in sizes.items()
        for i in range(size)
    ]
    write_run(tmp_path, records=records, task_meta=LINES_META)
    examples, total = sample_of(group_of(tmp_path / "demo"), limit=10)
    datasets = Counter(example["example_id"].split("-")[0] for example in examples)
    assert total == 43
    assert datasets == {"few": 3, "many": 7}


NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments")
    for name in NAMES:
        write_run(folder, experiment=name, records=lines_records("exact")[:3])
    return folder


def test_records_that_are_gone_are_said_in_the_terminal_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        write_run(tmp_path, method=m, records=lines_records(m)[:3]) for m in ("exact", "snapkv")
    ]
    for folder in folders:
        ids = [record["example_id"] for record in lines_records("exact")[:3]]
        (folder / "examples.json").write_text(json.dumps(ids))
    assert main([str(tmp_path / "demo")]) == 0
    assert capsys.readouterr().err == ""
    records = folders[1] / "records.jsonl"
    records.write_bytes(b"\n".join(records.read_bytes().split(b"\n")[:2]) + b'\n{"torn')
    for there in (2, 0):
        said = (
            f"records are missing: recall_mini/t/{folders[1].name} has {there} of 3; their command"
        )
        assert main([str(tmp_path / "demo")]) == 0
        assert capsys.readouterr().err.startswith(f"kvbench-report: warning: {said}")
        assert said in (tmp_path / "demo" / "report.html").read_text()
        records.unlink(missing_ok=True)


def test_the_command_makes_reports_with_an_index_and_lists_their_files(
    experiments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(experiments / "one"), "--list"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"{experiments}/one/report.html"
    assert len(out) > 5
    assert main([str(experiments / name) for name in NAMES]) == 0
    index = (experiments / "index.html").read_text()
    assert re.findall('href="([^"]*)"', index) == [f"{name}/report.html" for name in NAMES]
    assert write_index([experiments / "one"]) == experiments / "index.html"
    with pytest.raises(StoreError, match=r"no reports in .*nowhere; expected report\.html in each"):
        write_index([experiments / "nowhere"])


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--out", "x", "one"], 2),
        (["--rescored", "x", "one", "two"], 2),
        (["nowhere"], 1),
        (["one", "."], 1),
        (["one", "two", "three", "nowhere"], 1),
    ],
)
def test_the_command_says_an_error_in_a_line(
    words: list[str],
    status: int,
    experiments: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(experiments)
    try:
        returned: Any = main(words)
    except SystemExit as stopped:
        returned = stopped.code
    assert returned == status
    assert capsys.readouterr().err.count("\n") == 1


USERS_OWN = "<!doctype html><title>My results</title>\n"


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["one", "--index"], ["index.html"]),
        (["one", "two", "--out", "."], ["compare.html", "compare.csv"]),
        (["one"], ["one/report.html", "one/summary.json"]),
    ],
)
def test_a_file_of_the_user_s_is_not_replaced(
    words: list[str],
    files: list[str],
    experiments: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("one", "two"):
        shutil.copytree(experiments / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(list(words)) == 0, "its own is"
    for file in map(Path, files):
        own = file.read_text()
        file.write_text(USERS_OWN)
        assert main(list(words)) == 1
        assert file.read_text() == USERS_OWN
        error = capsys.readouterr().err
        assert f"{file} is not kvbench's and stays as it is" in error
        assert error.count("\n") == 1
        file.write_text(own)


def test_the_device_of_a_page_ran_the_model_and_its_commands_name_no_path_of_that_machine(
    tmp_path: Path,
) -> None:
    facts: list[tuple[dict[str, Any], str, str, str]] = [
        (
            {"gpu": "H100", "processor": "Xeon", "cpu": "2 cores"}, "H100",
            "kvbench task=needle results_dir=/home/ann/runs limit=2", "kvbench task=needle limit=2",
        ),
        (
            {"gpu": None, "processor": "Xeon", "cpu": "2 cores"}, "Xeon",
            "kvbench task=needle 'results_dir=/home/ann/runs'", "kvbench task=needle",
        ),
        ({"cpu": "2 cores"}, "2 cores", *["kvbench results_dir=results limit=2"] * 2),
    ]  # fmt: skip
    for name, (hardware, device, command, shown) in zip("abc", facts, strict=True):
        manifest = {"hardware": hardware, "command": command}
        write_run(tmp_path, experiment=name, records=lines_records("exact"), manifest=manifest)
        experiment = load_experiment(tmp_path / name)
        assert facts_of(experiment)["device"] == device
        assert dict(how_to_reproduce(experiment))["command"] == [shown]


def test_the_head_of_a_page_names_the_task_where_settings_differ(tmp_path: Path) -> None:
    """A probe of single layers keeps its own number of tokens at both ends, whatever the budget says."""
    common: dict[str, Any] = {"budget": {"sink": 4, "window": 8}, "compress_after": "prompt"}
    for task, records, own in (
        ("lines", lines_records("exact"), {}),
        ("layer_error", error_records("exact"), {"task": {"exact": 64}}),
    ):
        write_run(tmp_path, task=task, records=records, manifest={"identity": common | own})
    facts = facts_of(load_experiment(tmp_path / "demo"))
    assert facts["sink and window"] == (
        "layer_error: first 64 and last 64 tokens; lines: first 4 and last 8 tokens, always kept and not"
        " counted in the rate"
    )
    share = {"budget": common["budget"] | {"total_rate": 0.25}}  # of all of the prompt
    write_run(
        tmp_path, experiment="share", records=lines_records("exact"), manifest={"identity": share}
    )
    of_all = facts_of(load_experiment(tmp_path / "share"))["sink and window"]
    assert of_all == "first 4 and last 8 tokens, always kept"
    assert facts["compressed"] == (
        "layer_error: the cache of each layer by itself; lines: the whole prompt; an answer's first"
        " token is the exact cache's (prompt)"
    )


FORGED: list[tuple[str, Any]] = [
    ("task_meta.figures", [{"kind": "heatmap", "x": "length"}]),
    ("task_meta.figures", [{"kind": "heatmap", "x": "answers", "y": "depth"}]),
    ("task_meta.figures", [{"kind": "bars", "x": "answers"}]),
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
    ("record.ratio", 1e308),
    ("record.ratio", -1.0),
    ("record.entries", {"mean": "ten", "max": [1]}),
]


@pytest.mark.parametrize(("place", "odd"), FORGED, ids=range(len(FORGED)))
def test_forged_records_and_manifests_are_a_page_or_one_line(
    tmp_path: Path, place: str, odd: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    part, _, key = place.partition(".")
    records = needle_records("snapkv")[:8]
    records[0] |= {key: odd} if part == "record" else {}
    meta = NEEDLE_META | ({key: odd} if part == "task_meta" else {})
    run = write_run(tmp_path, method="snapkv", records=records, task_meta=meta)
    if part == "config":
        made = json.loads((run / "manifest.json").read_text())
        made["config"][key] = odd
        (run / "manifest.json").write_text(json.dumps(made))
    for command in (main, wandb_main) if part == "config" else (main,):
        with warnings.catch_warnings(action="error"):
            status = command([str(tmp_path / "demo")])
        assert status in (0, 1)
        said = capsys.readouterr().err
        assert said.count("\n") == (1 if ": warning: " in said else status)
