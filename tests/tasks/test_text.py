"""Running text as prompts: pieces in order, of the length asked for, with what follows as the answer."""

from __future__ import annotations

import pytest
from support.encoders import shipped

from kvbench.tasks.base import TaskError
from kvbench.tasks.text import RunningText


def test_pieces_of_files_follow_each_other_and_answers_follow_pieces(tmp_path):
    encoder = shipped()
    texts = {"a.txt": "one two three four five six seven. " * 9, "b.txt": "short text here. " * 7}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    task = RunningText(files=[f"{tmp_path}/*.txt"], tokens=20, max_new_tokens=5, num_examples=5)
    examples = task.examples(encoder)
    assert [e.id for e in examples][:3] == [
        "a.txt/0",
        "b.txt/0",
        f"a.txt/{20 - len(encoder.begin_ids)}",
    ]
    assert len(task.digests()) == 2
    begin = tuple(encoder.begin_ids)
    for example in examples:
        assert len(example.context_ids) == 20
        assert example.context_ids[: len(begin)] == begin
    whole = encoder.encode_text(texts["a.txt"])
    pieces = [e for e in examples if e.id.startswith("a.txt")]
    read = [token for e in pieces for token in e.context_ids[len(begin) :]]
    assert read == whole[: len(read)]
    assert pieces[0].answers == (encoder.decode(list(pieces[1].context_ids[len(begin) :][:5])),)
    assert task.score(pieces[0].answers[0], pieces[0])["score"] == 1.0
    assert task.score("zebra", pieces[0])["score"] == 0.0


def test_generated_text_is_long_enough_and_the_same_every_time():
    encoder = shipped()
    task = RunningText(tokens=300, num_examples=3)
    examples = task.examples(encoder)
    assert [len(e.context_ids) for e in examples] == [300] * 3
    assert examples == task.examples(encoder)
    assert len({e.context_ids for e in examples}) == 3


def test_what_cannot_be_met_is_refused(tmp_path):
    encoder = shipped()
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(TaskError, match=r"task.tokens is 500 and the longest text has \d+ tokens"):
        RunningText(files=[str(tmp_path / "a.txt")], tokens=500).examples(encoder)
    with pytest.raises(TaskError, match="one of them at most"):
        RunningText(files=["a"], dataset_name="b")
