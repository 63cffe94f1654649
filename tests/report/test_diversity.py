"""Self-BLEU: nltk's BLEU of each text against all others, and where it is shown."""

from __future__ import annotations

import math
import random

import pytest
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from support.report_runs import write_run

from kvbench.report.experiment import load_experiment
from kvbench.report.stats.diversity import self_bleu, words_of
from kvbench.report.tables.published import published_tables
from kvbench.report.tables.published_rows import comparison_tables
from kvbench.report.tables.scores import score_table


@pytest.mark.parametrize("seed", range(6))
def test_self_bleu_is_nltks_of_each_text_against_all_others(seed):
    draw = random.Random(seed)
    words = ["dog", "cat", "the", "ran", "sat", ".", "a"][: 3 + seed]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(12)]
    texts += [texts[0], "unlike anything"]
    worded = [words_of(text) for text in texts]
    smooth = SmoothingFunction().method1
    for i, found in enumerate(self_bleu(texts)):
        others = worded[:i] + worded[i + 1 :]
        theirs = sentence_bleu(others, worded[i], smoothing_function=smooth)
        assert found == pytest.approx(float(theirs), rel=1e-12)


def test_texts_that_repeat_each_other_are_least_diverse():
    same = "It was cold, and the wind blew all day."
    assert self_bleu([same] * 3) == pytest.approx([1.0] * 3)
    assert self_bleu(["one two three four five", "six seven eight nine ten"]) == [0.0, 0.0]
    assert math.isnan(self_bleu([same])[0])
    assert self_bleu(["", same, same])[0] == 0.0


SAID = {
    "exact": ["a b c d e f", "g h i j k l", "a b c d e m"],
    "h2o": ["a b c d e f", "g h i j k l", "n o p q r s"],
}


def written(folder, temperature):
    for method, texts in SAID.items():
        write_run(
            folder,
            task="summaries",
            method=method,
            model="LLaMA-7B",
            records=[
                {"example_id": f"x{i}", "dataset": "xsum", "score": 0.1, "prediction": text}
                for i, text in enumerate(texts)
            ],
            options={"sampling.temperature": temperature, "paper_table": "h2o_diversity"},
        )
    return load_experiment(folder / "demo")


def test_drawn_answers_are_shown_with_their_self_bleu_beside_the_papers(tmp_path):
    experiment = written(tmp_path, 0.3)
    means = {
        row.variant.method: row.costs["self_bleu"] for row in score_table(experiment.groups[0]).rows
    }
    assert means["exact"] > 0.3
    assert means["exact"] == pytest.approx(sum(self_bleu(SAID["exact"])) / 3)
    assert means["h2o"] == 0.0
    (table,) = published_tables(experiment)
    assert (table.unit, table.columns) == ("fraction", ("xsum",))
    pairs = {row.method: row.pairs[0] for row in table.rows}
    assert pairs["exact"].published == pytest.approx(0.57)
    assert pairs["exact"].ours.value == pytest.approx(100 * means["exact"])
    assert pairs["h2o"].published == pytest.approx(0.51)
    (shown,) = comparison_tables([table])
    assert shown.title == "summaries, self bleu: ours beside h2o_diversity, %"


def test_greedy_answers_have_no_self_bleu(tmp_path):
    group = written(tmp_path, 0).groups[0]
    assert all(math.isnan(row.costs["self_bleu"]) for row in score_table(group).rows)


def test_a_budget_of_entries_has_no_rate(tmp_path):
    for size in (64, 256):
        options = {"budget.size": size}
        record = {"example_id": "x", "dataset": "d", "score": 0.5}
        write_run(tmp_path, method="h2o", records=[record], options=options)
    (group,) = load_experiment(tmp_path / "demo").groups
    assert {variant.rate for variant in group.variants} == {None}
    assert {variant.label for variant in group.variants} == {"h2o, size 64", "h2o, size 256"}
