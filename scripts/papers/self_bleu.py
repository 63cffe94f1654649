"""How alike sampled answers are: Self-BLEU, as H2O's appendix C.1 has it, beside the published numbers.

    kvbench reproduce h2o_figure7
    python scripts/papers/self_bleu.py runs/h2o_figure7

In: the records of an experiment. Out: a table, and self_bleu.csv in its folder: for each model, data set
and method the mean over answers of the BLEU-4 (0 to 1, the lower, the more diverse) that an answer has
with the method's other answers on the data set as references. H2O (arXiv 2306.14048) names the measure
(arXiv 1802.01886), but neither the length of n-grams, nor the smoothing (here method 1 of Chen and
Cherry, 2014), nor what a word is (here words and punctuation marks).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

from kvbench import load
from kvbench.errors import UserError, complain
from kvbench.report.papers import paper_folders

MOST_COMPARED = 2_000_000
"""Words of all texts times texts, which take minutes; those of H2O's 100 texts are 640,000."""


def self_bleu(texts: Sequence[str]) -> list[float]:
    """For each text its BLEU-4 with all others as references."""
    words = [re.findall(r"\w+|[^\w\s]", text) for text in texts]
    if len(texts) < 2:
        raise UserError(
            "Self-BLEU compares answers: allowed: two or more of a method on a data set"
        )
    if len(texts) * sum(map(len, words)) > MOST_COMPARED:
        raise UserError(
            f"{len(texts)} answers of {sum(map(len, words))} words are too many; use limit=100"
        )
    smooth = SmoothingFunction().method1
    return [
        float(sentence_bleu(words[:i] + words[i + 1 :], own, smoothing_function=smooth))
        for i, own in enumerate(words)
    ]


def table_of(folder: Path) -> pd.DataFrame:
    records = load(folder)
    answered = records[records["status"].eq("ok") & records["prediction"].notna()]
    keys = ["model", "dataset", "variant", "method"]
    rows = []
    for key, of_seeds in answered.groupby(keys, sort=False):
        likeness = [
            x for _, part in of_seeds.groupby("seed") for x in self_bleu(list(part["prediction"]))
        ]
        about = {"answers": len(likeness), "self_bleu": sum(likeness) / len(likeness)}
        rows.append(dict(zip(keys, key, strict=True)) | about)
    place = next(place for place in paper_folders() if (place / "h2o_diversity.csv").is_file())
    printed = pd.read_csv(place / "h2o_diversity.csv", dtype={"printed": str}).rename(
        columns={"value": "dataset", "model": "published_of", "printed": "published"}
    )
    theirs = printed[["dataset", "method", "published", "published_of"]]
    return pd.DataFrame(rows).merge(theirs, "left", ["dataset", "method"])


def main(folder: str) -> None:
    table = table_of(Path(folder))
    table.to_csv(Path(folder) / "self_bleu.csv", index=False, float_format="%.6g")
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4f}"))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (UserError, TypeError) as error:
        complain(f"{error}; usage: self_bleu.py <folder of an experiment>", "self_bleu")
        sys.exit(2)
