"""Running text: pieces of files or generated, each followed by what comes next."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.encoders import shipped

from kvbench.tasks.base import TaskError
from kvbench.tasks.text import RunningText


def test_pieces_of_running_text_follow_each_other_and_answers_follow_pieces(tmp_path: Path) -> None:
    encoder = shipped()
    texts = {"a.txt": "one two three four five six seven. " * 9, "b.txt": "short text here. " * 7}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    task = RunningText(files=[f"{tmp_path}/*.txt"], tokens=20, max_new_tokens=5, num_examples=5)
    examples = task.examples(encoder)
    begin = encoder.begin_ids
    assert [e.id for e in examples][:3] == ["a.txt/0", "b.txt/0", f"a.txt/{20 - len(begin)}"]
    assert len(task.digests()) == 2
    assert {e.dataset for e in examples} == {task.label}
    for example in examples:
        assert len(example.context_ids) == 20
        assert list(example.context_ids[: len(begin)]) == begin
    pieces = [e for e in examples if e.id.startswith("a.txt")]
    read = [token for e in pieces for token in e.context_ids[len(begin) :]]
    assert read == encoder.encode_text(texts["a.txt"])[: len(read)]
    assert pieces[0].answers == (encoder.decode(list(pieces[1].context_ids[len(begin) :][:5])),)
    assert task.score(pieces[0].answers[0], pieces[0])["score"] == 1.0
    assert task.score("zebra", pieces[0])["score"] == 0.0
    with pytest.raises(TaskError, match=r"task.tokens is 500 and the longest text has \d+ tokens"):
        RunningText(files=[str(tmp_path / "a.txt")], tokens=500).examples(encoder)


def test_generated_running_text_is_the_same_every_time() -> None:
    encoder = shipped()
    generated = RunningText(tokens=300, num_examples=3)
    found = generated.examples(encoder)
    assert [len(e.context_ids) for e in found] == [300] * 3
    assert found == generated.examples(encoder)
    assert len({e.context_ids for e in found}) == 3
