"""Running text: pieces of files or generated, each followed by what comes next."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.encoders import ids_of, shipped

from kvbench.tasks.base import TaskError
from kvbench.tasks.text import RunningText

TEXTS = {"a.txt": "one two three four five six seven. " * 9, "b.txt": "short text here. " * 7}


@pytest.fixture
def task(tmp_path: Path) -> RunningText:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return RunningText(files=[f"{tmp_path}/*.txt"], tokens=20, max_new_tokens=5, num_examples=5)


def test_the_first_pieces_of_all_texts_come_first(task: RunningText) -> None:
    begin = shipped().begin_ids
    examples = task.examples(shipped())
    ids = ["a.txt/0", "b.txt/0", f"a.txt/{20 - len(begin)}"]
    assert [example.id for example in examples][:3] == ids
    assert {example.dataset for example in examples} == {task.label}
    for example in examples:
        assert len(ids_of(example)) == 20
        assert ids_of(example)[: len(begin)] == begin
    assert len(task.digests()) == 2


def test_pieces_follow_each_other_and_the_answer_follows_the_piece(task: RunningText) -> None:
    encoder = shipped()
    pieces = [
        ids_of(example)[len(encoder.begin_ids) :]
        for example in task.examples(encoder)
        if example.id.startswith("a.txt")
    ]
    ids = [token for piece in pieces for token in piece]
    assert ids == encoder.encode_text(TEXTS["a.txt"])[: len(ids)]
    first, *_ = task.examples(encoder)
    assert first.answers == (encoder.decode(pieces[1][:5]),)
    assert task.score(first.answers[0], first)["score"] == 1.0
    assert task.score("zebra", first)["score"] == 0.0


def test_a_text_that_is_too_short_or_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXTS["a.txt"])
    with pytest.raises(TaskError, match=r"task.tokens is 500 and the longest text has \d+ tokens"):
        RunningText(files=[str(tmp_path / "a.txt")], tokens=500).examples(shipped())
    with pytest.raises(TaskError, match=r"^task\.files: no file matches \['none\.txt'\]; allowed"):
        RunningText(files=["none.txt"]).examples(shipped())
