"""The shipped model is small and without pickles, and can be trained again; `make results` measures what
it finds."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys

import pytest
from support.paths import ROOT
from transformers import AutoTokenizer

ASSET = ROOT / "kvbench" / "assets" / "recall_mini"
SCRIPTS = ROOT / "scripts" / "recall_mini"


def test_it_is_small_and_holds_no_pickles() -> None:
    assert sum(file.stat().st_size for file in ASSET.glob("*.safetensors")) <= 12e6
    assert {file.suffix for file in ASSET.iterdir()} <= {".safetensors", ".json", ".md"}


@pytest.mark.slow
def test_the_training_script_starts() -> None:
    command = [sys.executable, str(SCRIPTS / "train.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_training_texts_have_the_tokens_of_the_whole_text() -> None:
    script = runpy.run_path(str(SCRIPTS / "recall_mini_data.py"))
    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    generator = script["Generator"](tokenizer)
    rng = random.Random(0)
    examples = [
        generator.record(rng, 30, 4, repeats=2),
        generator.shuffled_lines(rng, 3, 160, full=True),
    ]
    for example in examples:
        text = tokenizer.decode(example.ids)
        assert tokenizer.encode(text, add_special_tokens=False) == example.ids
