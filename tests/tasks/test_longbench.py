"""LongBench: scores and prompts of the original, and data that are refused in one line."""

from __future__ import annotations

import json
import logging
import socket
import zipfile
from pathlib import Path

import pytest

from kvbench.tasks.base import TaskError
from kvbench.tasks.hub import commit_of, hub_answers, hub_rows
from kvbench.tasks.longbench import E_DATASETS, bucket_means, prompt_template, prompts, score
from kvbench.tasks.longbench.data import Source
from kvbench.tasks.longbench.metrics import code_similarity
from kvbench.tasks.longbench.prompts import PINNED, fill, max_new_tokens

EXAMPLES = Path(__file__).parents[1] / "data" / "longbench"


@pytest.fixture
def golden(shared_file):
    return json.loads(shared_file("golden/longbench_metrics.json").read_text(encoding="utf-8"))


def test_every_case_scored_by_the_original_code_scores_the_same(golden):
    assert len(golden["cases"]) == 342
    for case in golden["cases"]:
        found = score(case["dataset"], case["prediction"], case["answers"], case["all_classes"])
        assert found == pytest.approx(case["score"], abs=1e-9), (case["dataset"], case["case"])


def test_buckets_and_whole_sets_are_the_originals(golden):
    for dataset, whole in golden["whole_set"].items():
        cases = [case for case in golden["cases"] if case["dataset"] == dataset]
        assert len(cases) == whole["n"]
        scores = [
            score(dataset, c["prediction"], c["answers"], whole["all_classes"]) for c in cases
        ]
        assert round(100 * sum(scores) / len(scores), 2) == pytest.approx(whole["scorer"], abs=1e-9)
        means = bucket_means(scores, [case["length"] for case in cases])
        for name, expected in whole["scorer_e"].items():
            assert round(100 * means[name], 2) == pytest.approx(expected, abs=1e-9), (dataset, name)


def test_code_similarity_ignores_an_installed_levenshtein(golden, monkeypatch):
    class Wrong:
        def __init__(self, *arguments):
            raise AssertionError("the backend of fuzzywuzzy was asked")

    monkeypatch.setattr("fuzzywuzzy.fuzz.SequenceMatcher", Wrong)
    differing = [c for c in golden["cases"] if c.get("score_levenshtein_backend") != c["score"]]
    for case in (c for c in differing if "score_levenshtein_backend" in c):
        found = score(case["dataset"], case["prediction"], case["answers"])
        assert found == pytest.approx(case["score"], abs=1e-9)


def test_a_line_of_code_may_be_blank():
    assert code_similarity("\n\n# comment\n\nx = 1", "x = 1") == 0.0  # the blank line is compared
    assert code_similarity("", "") == 1.0
    assert code_similarity("# nothing else", "x") == 0.0


def test_rouge_does_not_depend_on_the_depth_of_its_caller():
    text = " ".join(f"w{i}" for i in range(900))

    def deep(levels: int) -> float:
        return score("gov_report", text, [text]) if levels == 0 else deep(levels - 1)

    assert deep(0) == deep(700) == pytest.approx(0.999999995, abs=1e-9)
    longer = " ".join(f"w{i}" for i in range(1010))
    assert score("gov_report", longer, [longer]) == 0.0  # the original's recursion limit


def test_all_chinese_metrics_run():
    assert score("multifieldqa_zh", "北京", ["北京"]) == 1.0
    assert score("vcsum", "会议讨论了预算", ["会议讨论了预算"]) == pytest.approx(1.0)
    assert score("passage_retrieval_zh", "段落3", ["段落3"]) == 1.0
    assert score("lsht", "\n体育\n财经", ["体育"], ["体育", "财经"]) == 1.0


def test_unknown_datasets_and_missing_classes_are_named():
    with pytest.raises(TaskError, match="dataset 'quality' unknown; allowed: 2wikimqa"):
        score("quality", "a", ["a"])
    with pytest.raises(TaskError, match="trec is scored by its classes"):
        score("trec", "a", ["a"])
    assert score("qasper", "a", []) == 0.0


def test_every_template_is_the_originals(shared_file):
    expected = json.loads(shared_file("golden/longbench_prompt_sha256.json").read_text())
    assert {name: (e["sha256"], e["max_new_tokens"]) for name, e in expected.items()} == PINNED
    for name, entry in expected.items():
        template = prompt_template(name)  # its hash is checked
        assert len(template) == entry["n_chars"]
        assert max_new_tokens(name) == entry["max_new_tokens"]
        assert "{context}" in template


def test_a_template_that_is_not_the_originals_stops_the_task(monkeypatch):
    prompt_template.cache_clear()
    monkeypatch.setattr(prompts, "_template_of_lm_eval", lambda name: "Read {context}\n{input}")
    with pytest.raises(TaskError, match="template of samsum in the installed lm-eval is not"):
        prompt_template("samsum")
    monkeypatch.undo()
    monkeypatch.setattr(prompts, "files", lambda package: Path("nowhere"))
    with pytest.raises(TaskError, match="has no template of samsum"):
        prompt_template("samsum")
    prompt_template.cache_clear()


def test_braces_in_the_text_are_left_alone():
    prompt, cut = fill("A {context} B {input} C", "{input} {context} {x}", "{context}")
    assert prompt == "A {input} {context} {x} B {context} C"
    assert prompt[:cut] == "A {input} {context} {x}"


@pytest.mark.parametrize("name", E_DATASETS)
def test_the_invented_examples_have_the_format(name):
    rows = Source(str(EXAMPLES)).rows(f"{name}_e")
    assert len(rows) == 3
    assert [row.id for row in rows] == sorted(row.id for row in rows)
    assert all(row.answers and row.context for row in rows)


def test_invented_examples_reach_every_length_bucket():
    lengths = [r.length for n in E_DATASETS for r in Source(str(EXAMPLES)).rows(f"{n}_e")]
    assert min(lengths) < 4000 <= sorted(lengths)[-2] < 8000 <= max(lengths)


def test_real_data_can_be_read(shared_file):
    source = Source(str(shared_file("data/longbench")))
    rows = source.rows("multi_news")
    assert len(rows) == 200
    assert [row.id for row in rows] == sorted(row.id for row in rows)
    raw = map(json.loads, shared_file("data/longbench/multi_news.jsonl").open(encoding="utf-8"))
    by_id = {line["_id"]: line for line in raw}
    for row in rows:
        assert row.context == by_id[row.id]["context"]
        assert list(row.answers) == by_id[row.id]["answers"]
        assert row.length == by_id[row.id]["length"]


def test_a_folder_a_zip_and_parquet_give_the_same_rows(tmp_path):
    file = EXAMPLES / "trec_e.jsonl"
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(file, "data/trec_e.jsonl")
    import pandas as pd

    (tmp_path / "trec_e").mkdir()
    frame = pd.read_json(file, lines=True).rename(columns={"input": "question"})
    frame.to_parquet(tmp_path / "trec_e" / "test-00000-of-00001.parquet")
    folder = Source(str(EXAMPLES))
    archived = Source(str(tmp_path / "data.zip"))
    assert folder.rows("trec_e") == archived.rows("trec_e") == Source(str(tmp_path)).rows("trec_e")
    assert folder.digest("trec_e") == archived.digest("trec_e")


GOOD = {
    "_id": "a",
    "context": "c",
    "input": "i",
    "answers": ["x"],
    "length": 3,
    "all_classes": None,
}
CUT = json.dumps({**GOOD, "_id": "b"})[:-9]


@pytest.mark.parametrize(
    ("stem", "text", "message"),
    [
        ("qasper_e", [GOOD, CUT], r"qasper_e.jsonl line 2 is not complete JSON"),
        ("qasper_e", [GOOD, b'{"_id": "\xff"}'], r"line 2 is not UTF-8 \(byte 9\)"),
        ("qasper_e", [GOOD, "", {"_id": "b"}], r"line 3: field context is missing; allowed: text"),
        ("qasper_e", [{**GOOD, "answers": []}], r"line 1: field answers is \[\]; allowed: a list"),
        ("qasper_e", [{**GOOD, "answers": "x"}], r"field answers is 'x'; allowed: a list"),
        ("qasper_e", [{**GOOD, "length": None}], r"field length is None; allowed: an integer >= 0"),
        (
            "qasper_e",
            [{**GOOD, "context": " "}],
            r"field context is ' '; allowed: text that is not",
        ),
        ("trec_e", [GOOD], r"trec_e.jsonl line 1: field all_classes is None; allowed: a list"),
        (
            "passage_retrieval_en_e",
            [GOOD],
            r"field answers is \['x'\]; allowed: text with Paragraph",
        ),
        ("qasper_e", [GOOD, GOOD], r"has _id 'a' twice; allowed: once"),
        ("qasper_e", [], r"holds no example"),
        ("qasper_e", ["[1, 2]"], r"line 1 is not an object with fields"),
    ],
)
def test_bad_data_is_one_line_naming_file_line_and_field(tmp_path, capsys, stem, text, message):
    lines = [
        t if isinstance(t, bytes) else (t if isinstance(t, str) else json.dumps(t)).encode()
        for t in text
    ]
    (tmp_path / f"{stem}.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(TaskError, match=message) as caught:
        Source(str(tmp_path)).rows(stem)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""


def test_text_that_looks_like_a_date_stays_text(tmp_path):
    row = {**GOOD, "answers": ["2009-01-02"], "input": "2009-01-03"}
    (tmp_path / "qasper_e.jsonl").write_text(json.dumps(row))
    (found,) = Source(str(tmp_path)).rows("qasper_e")
    assert found.answers == ("2009-01-02",)
    assert found.input == "2009-01-03"


def test_missing_files_say_how_to_get_them(tmp_path):
    with pytest.raises(
        TaskError, match=r"hf download THUDM/LongBench data\.zip --repo-type dataset"
    ):
        Source(str(tmp_path)).rows("qasper_e")
    with pytest.raises(TaskError, match="which does not exist"):
        Source(str(tmp_path / "nothing")).rows("qasper_e")
    (tmp_path / "file").write_text("x")
    with pytest.raises(TaskError, match="allowed: a folder, a zip archive"):
        Source(str(tmp_path / "file")).rows("qasper_e")


@pytest.mark.parametrize("reached", [True, False])
def test_the_hubs_archive_is_fetched_at_its_revision(tmp_path, monkeypatch, caplog, reached):
    monkeypatch.setattr("kvbench.tasks.hub.hub_answers", lambda: reached)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(EXAMPLES / "lcc_e.jsonl", "data/lcc_e.jsonl")
    asked = []

    def fetch(repository, name, *, repo_type, revision, local_files_only):
        asked.append((repository, name, repo_type, revision, local_files_only))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert Source(None, "abc").rows("lcc_e") == Source(str(EXAMPLES)).rows("lcc_e")
    assert set(asked) == {("THUDM/LongBench", "data.zip", "dataset", "abc", not reached)}

    def refuse(*arguments, **options):
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TaskError, match=r"revision abc\) cannot be fetched \(OSError\); allowed: a"),
    ):
        Source(None, "abc").rows("lcc_e")
    assert not caplog.records, "the error is the only line"


def test_a_mirror_is_read_by_datasets(monkeypatch):
    raw = [json.loads(line) for line in (EXAMPLES / "qasper_e.jsonl").open()]
    asked = []

    def load(path, *, name, split, streaming, revision):
        asked.append((path, name, split, revision))
        return raw

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("kvbench.tasks.hub.hub_answers", lambda: True)
    rows = Source("hf://datasets/someone/LongBench", "r").rows("qasper_e")
    assert asked == [("someone/LongBench", "qasper_e", "test", "r")]
    assert [row.id for row in rows] == sorted(line["_id"] for line in raw)

    monkeypatch.setattr("kvbench.tasks.hub.hub_answers", lambda: False)
    with pytest.raises(TaskError, match="the Hub cannot be reached; allowed: a network"):
        hub_rows("longbench", "someone/LongBench", "qasper_e", "test", None)
    with pytest.raises(TaskError, match="someone/LongBench"):
        commit_of("longbench", "someone/LongBench", None)
    assert len(asked) == 1, "the library is not asked where the Hub is silent"


def test_a_hub_that_is_not_there_is_found_out_at_once(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr("kvbench.tasks.hub.getproxies", dict)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        assert not hub_answers(), "bound, not listening: refused"
        server.listen()
        assert hub_answers()
    monkeypatch.setattr("kvbench.tasks.hub.getproxies", lambda: {"https": "http://proxy"})
    assert hub_answers(), "behind a proxy the library finds out itself"
