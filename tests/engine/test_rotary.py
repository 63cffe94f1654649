"""Models whose rotary table depends on the length: every example has the table of its own length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from support.asking import Prompt, generate, generate_each
from support.forward import reference
from support.tiny import CHANGE, on_kvbench, prompt_ids
from support.tiny import model_with_table as tiny

from kvbench import compress
from kvbench.engine import ask as scoring
from kvbench.engine.answer import Stopping
from kvbench.engine.ask import Question
from kvbench.engine.live_cache import UnsupportedGeneration
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods import build_method
from kvbench.methods.base import Method, SecondPass

NEW = 12
LENGTHS = (90, 20, 66, 40, 66, CHANGE - NEW + 1)
CROSSING = r"and \d+ more cross 64, beyond which LongRoPE of model type 'phi3' has other factors"


@cache
def expected(kind: str, n: int) -> list[int]:
    return reference(tiny(kind), prompt_ids(n), NEW)


METHODS = {
    "exact": (build_method("exact"), Budget()),
    "local": (build_method("local"), Budget(rate=0.3, sink=2, window=4)),
}


@pytest.mark.parametrize("batch_size", [2, 6])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_answers_are_those_of_generate_in_any_batch_and_order(kind, batch_size):
    """A prompt of 53 reaches the change with its last token, which is not fed."""
    model = on_kvbench(tiny(kind))
    for first in range(0, len(LENGTHS), batch_size):
        lengths = LENGTHS[first : first + batch_size]
        prompts = [Prompt.of((), prompt_ids(n), METHODS, Stopping(NEW), str(n)) for n in lengths]
        for n, results in zip(lengths, generate_each(model, prompts, seed=0), strict=True):
            assert results["exact"].tokens == expected(kind, n), n


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_compress_generates_what_a_new_model_does(kind):
    model = tiny(kind)
    for n in LENGTHS:
        with compress(model, "exact") as session:
            assert reference(model, prompt_ids(n), NEW) == expected(kind, n), n
        assert len(session.rows) == 1


def test_dynamic_answers_that_cross_are_those_of_generate():
    model = on_kvbench(tiny("dynamic"))
    lengths = (60, 90, 58, 63)
    prompts = [Prompt.of((), prompt_ids(n), METHODS, Stopping(NEW), str(n)) for n in lengths]
    for n, results in zip(lengths, generate_each(model, prompts, seed=0), strict=True):
        assert results["exact"].tokens == expected("dynamic", n), n


def test_later_questions_of_another_length_have_their_own_table():
    """The second questions of two conversations begin at different tokens."""

    def answers(questions):
        conversations = [
            [Question(prompt_ids(k, k), Stopping(NEW)), Question(prompt_ids(4), Stopping(NEW))]
            for k in questions
        ]
        prompt = Prompt(prompt_ids(50), METHODS, "x", conversations)
        model = on_kvbench(tiny("dynamic"))
        found = generate(model, [prompt], seed=0)[0]["exact"]
        return [answer.tokens for answer in found]

    assert answers([3, 20]) == answers([3]) + answers([20])


@dataclass(frozen=True, kw_only=True)
class Repeats(Method):
    second_pass = SecondPass(chunk=30)

    def observe(self, layer, replay, budget) -> None:
        pass

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        raise AssertionError("a chunk that crosses was scored")


def test_an_answer_that_would_cross_is_refused():
    model = tiny("longrope")
    for n in (54, 64):
        with (
            compress(model, "exact") as session,
            pytest.raises(UnsupportedGeneration, match=CROSSING),
        ):
            reference(model, prompt_ids(n), NEW)
        assert len(session.rows) == 1
    with compress(model, "exact") as session:
        context = session.read(prompt_ids(40))
        with pytest.raises(KVError, match=CROSSING):
            context.ask(prompt_ids(14), max_new_tokens=NEW)
        assert len(context.ask(prompt_ids(13), max_new_tokens=NEW)) == NEW
        # the whole conversation would be read again
        whole = torch.tensor([[*context.token_ids, *prompt_ids(30)]])
        with pytest.raises(UnsupportedGeneration, match=CROSSING):
            model.generate(whole, past_key_values=context.cache(), max_new_tokens=2)
    on_kvbench(model)
    prompt = Prompt.of((), prompt_ids(54), METHODS, Stopping(NEW), "x")
    for result in generate_each(model, [prompt], seed=0)[0].values():
        assert isinstance(result.failure, KVError)
        assert "54 tokens and 11 more cross 64" in str(result.failure)
    reading = scoring.read(model, prompt_ids(60), METHODS, seed=0, name="x", held_back=1, room=20)
    found = scoring.score(model, reading, [prompt_ids(20)])
    assert all("cross 64" in str(scored.failure) for [scored] in found.values())
    reading = scoring.read(model, prompt_ids(60), METHODS, seed=0, name="x", held_back=1, room=20)
    found = scoring.score(model, reading, [prompt_ids(3), prompt_ids(20)])["exact"]
    assert [scored.failure is None for scored in found] == [True, False], "the long one alone"
    small = {"r": (Repeats(), Budget(sink=0, window=0))}
    prompt = Prompt.of((), prompt_ids(50), small, Stopping(1), "x")
    failure = generate_each(model, [prompt], seed=0)[0]["r"].failure
    assert "50 tokens and 30 more cross 64" in str(failure), "a repetition of the prompt, too"


@pytest.mark.parametrize("n", [40, 60, 80])
def test_likelihoods_do_not_depend_on_longer_continuations(n):
    model = on_kvbench(tiny("dynamic"))
    options = [prompt_ids(3, 1), prompt_ids(15, 2)]

    def logprobs(continuations):
        reading = scoring.read(
            model, prompt_ids(n), METHODS, seed=0, name="x", held_back=1, room=20
        )
        found = scoring.score(model, reading, continuations)["exact"]
        return [value for scored in found for value in scored.logprobs]

    together = torch.tensor(logprobs(options))
    alone = torch.tensor(logprobs(options[:1]) + logprobs(options[1:]))
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
