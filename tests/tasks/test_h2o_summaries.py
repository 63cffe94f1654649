"""H2O's summaries: HELM's prompts from released rows and from the Hub's, and ROUGE as released."""

from __future__ import annotations

import json

import pytest
from hydra.utils import instantiate
from rouge import Rouge
from support.configs import composed
from support.encoders import shipped
from support.paths import ROOT

from kvbench.tasks.metrics import METRICS, Key

DATA = ROOT / "tests" / "data" / "summaries"
HUB = {
    "xsum": {"document": "A dog ran.", "summary": "Dog runs.", "id": "7"},
    "cnn_dailymail": {"article": "A dog ran.", "highlights": "Dog runs.", "id": "7"},
}


def made(data, *overrides):
    config = composed("task=h2o_summaries", f"task.data={data}", *overrides)
    return instantiate(config.task, _convert_="all")


def test_a_released_row_is_its_prompt_and_gives_tokens_and_stop():
    examples = made(DATA).examples(shipped())
    assert [e.dataset for e in examples[:4]] == ["xsum", "cnn_dailymail"] * 2
    for example, name in zip(examples[:2], ("xsum", "cnn"), strict=True):
        row = json.loads((DATA / f"{name}_0shot.jsonl").read_text().splitlines()[0])
        assert example.context + example.question == row["article"]
        assert example.answers == (row["summary_gt"],)
        assert example.max_new_tokens == row["max_tokens"]
        assert list(example.stop) == row["stop"]


@pytest.mark.parametrize(
    ("name", "count"), [("xsum", "1 sentence"), ("cnn_dailymail", "3 sentences")]
)
def test_a_row_of_the_hub_becomes_helms_prompt(name, count, tmp_path):
    for file in ("xsum_0shot", "cnn_0shot"):
        (tmp_path / f"{file}.jsonl").write_text(json.dumps(HUB[name]))
    (example,) = made(tmp_path, f"task.datasets=[{name}]").examples(shipped())
    prompt = f"###\nArticle: A dog ran.\n\nSummarize the above article in {count}.\n"
    assert example.context + example.question == prompt
    assert example.answers == ("Dog runs.",)


def test_without_a_folder_the_hubs_data_sets_are_read(monkeypatch):
    asked = []

    def rows(task, dataset, config, split, revision):
        asked.append((dataset, config, split))
        return iter([HUB["xsum" if "xsum" in dataset else "cnn_dailymail"]])

    monkeypatch.setattr("kvbench.tasks.jsonl.rows.hub_rows", rows)
    task = made("null")
    assert len(task.examples(shipped())) == 2
    assert asked == [
        ("EdinburghNLP/xsum", None, "test"),
        ("abisee/cnn_dailymail", "3.0.0", "test"),
    ]


def test_rouge_is_that_of_the_released_script():
    prediction, answer = "the old harbour was opened on Monday", "The harbour was opened on Sunday."
    (theirs,) = Rouge().get_scores(prediction, answer)
    found = METRICS["rouge_2"](prediction, Key((answer,)))
    assert found == {
        "score": theirs["rouge-2"]["f"],
        "rouge1": theirs["rouge-1"]["f"],
        "rougeL": pytest.approx(theirs["rouge-l"]["f"]),
    }
    assert 0 < found["score"] < found["rougeL"]


@pytest.mark.parametrize("nothing", ["", "\n", "...", " . "])
def test_an_answer_without_words_has_no_rouge(nothing):
    assert set(METRICS["rouge_2"](nothing, Key(("a dog ran",))).values()) == {0.0}
