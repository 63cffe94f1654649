"""Key-value retrieval, passkey and number string: what is hidden, where, and what is asked."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

import pytest
from hydra.utils import instantiate
from support.configs import composed
from support.encoders import Letters, chat, ids_of, shipped

from kvbench.run.encoding import encode_examples
from kvbench.tasks.base import PromptEncoder, TaskError


def task(name: str, **options: Any) -> Any:
    settings = [f"task.{key}={value}" for key, value in options.items()]
    return instantiate(composed(f"task={name}", *settings).task, _convert_="all")


def test_an_object_of_uuids_and_the_value_of_a_key():
    made = task("key_value", num_pairs="[5,9]", num_examples=3)
    found = made.examples(shipped())
    assert [e.fields["num_pairs"] for e in found] == [5, 9] * 3
    for example in found:
        data = json.loads(example.context.partition("JSON data:\n")[2])
        key = re.fullmatch(r'Key: "(.+)"\nCorresponding value:', example.question)
        assert key is not None
        assert data[key[1]] == example.answers[0]
        assert len(data) == example.fields["num_pairs"]
        assert all(uuid.UUID(text).version == 4 for pair in data.items() for text in pair)
        assert made.score(f' "{example.answers[0].upper()}",', example) == {"score": 1.0}
        assert made.score(example.answers[0][:-1], example) == {"score": 0.0}
        assert example.settled("is " + example.answers[0])
    again = task("key_value", num_pairs="[5,9]", num_examples=3).examples(shipped())
    assert [(e.id, e.context, e.question) for e in again] == [
        (e.id, e.context, e.question) for e in found
    ]
    assert len({e.context for e in found}) == 6


def test_several_keys_are_asked_of_one_object():
    found = task("key_value", num_pairs="[12]", num_examples=4, queries=3).examples(shipped())
    for first in range(0, len(found), 3):
        group = found[first : first + 3]
        assert len({e.context for e in group}) == len({e.context_id for e in group}) == 1
        assert len({e.answers for e in group}) == 3
        depths = [e.fields["depth"] for e in group]
        assert depths == sorted(depths)
        encoded = encode_examples(group, shipped())
        assert len({e.context_ids for e in encoded}) == 1
    with pytest.raises(Exception, match=r"task.queries is 13; allowed: at most 12"):
        task("key_value", num_pairs="[12]", queries=13)
    with pytest.raises(
        Exception, match=r"task.template is .*allowed: \{pairs\} and, after it, \{key\}"
    ):
        task("key_value", template="'{key} {pairs}'")


@pytest.mark.parametrize("name", ["passkey", "number_string"])
def test_a_key_is_hidden_in_a_text_as_long_as_there_is_room(name):
    made = task(name, lengths="[400,900]", num_examples=12)
    found = made.examples(shipped())
    for example in found:
        (key,) = example.answers
        assert example.context.count(key) == 2
        assert len(key) == (5 if name == "passkey" else 10)
        assert example.fields["length"] - 32 <= len(ids_of(example)) <= example.fields["length"]
        lines = example.context.strip().split("\n")[2:]
        place = next(i for i, line in enumerate(lines) if key in line)
        assert abs(example.fields["depth"] - 100 * place / len(lines)) <= 15
        assert made.score(f" {key}. 1", example) == {"score": 1.0}
        assert made.score(f"1 {key}", example) == {"score": 0.0}
        assert not example.settled(key)
        assert example.settled(key + ".")
    if name == "number_string":
        assert all(re.search(r"(\d)\1", e.answers[0]) for e in found)
        assert found[0].question == ("What is the sequence of digits?\n\nThe sequence of digits is")
    assert len({e.fields["depth"] for e in found}) > 4
    assert made.examples(shipped()) == found
    other = task(name, seed=1, lengths="[400]").examples(shipped())
    assert other[0].context not in {e.context for e in found}


def test_several_keys_have_names():
    found = task("passkey", lengths="[500]", num_examples=3, queries=3).examples(shipped())
    for first in range(0, len(found), 3):
        group = found[first : first + 3]
        assert len({e.context_id for e in group}) == len({e.context_ids for e in group}) == 1
        for example in group:
            name = re.search(r"What is the pass key( of the \w+ \w+)\?", example.question)
            assert name is not None
            (key,) = example.answers
            assert f"The pass key{name[1]} is {key}. Remember it. {key} is" in example.context
            assert example.question.endswith(f"The pass key{name[1]} is")
    with pytest.raises(Exception, match=r"task.question is .* allowed: text with \{name\}"):
        task("passkey", queries=2, question="Which?")


def test_the_answer_begins_behind_the_assistants_header():
    (example,) = task("passkey", lengths="[300]", num_examples=1).examples(chat())
    text = chat().decode(ids_of(example))
    assert text.endswith("What is the pass key?</user><model>\n\nThe pass key is")
    assert len(ids_of(example)) <= 300


def test_a_length_that_is_too_short_is_one_line():
    with pytest.raises(TaskError, match=r"task.lengths has 50, and the shortest prompt takes \d+"):
        task("passkey", lengths="[50]").examples(shipped())
    (example, *_) = task("passkey", lengths="[2000]").examples(PromptEncoder(Letters()))
    assert 1900 <= len(ids_of(example)) <= 2000
