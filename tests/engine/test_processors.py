"""The logits processors of a model's generation config: the tokens are those of `generate`."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from support.asking import Prompt, generate
from support.generation import SMALL, Letters, tiny_model
from support.jobs import make_job
from support.tiny import prompt_ids

from kvbench import compare, compress
from kvbench.engine import processors, steps
from kvbench.engine.answer import Stopping
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.ask import Question
from kvbench.engine.model import ModelSpec, load_generation_config
from kvbench.engine.processors import acting_options
from kvbench.engine.steps import Steps
from kvbench.kv import Budget
from kvbench.methods import build_method

PROMPT = prompt_ids(60) * 2
END = 44  # the sixth token of the answer to the prompt
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "suppress_tokens": [16, 9]},
    {"no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [[26], [16, 50]]},
    {"begin_suppress_tokens": [*range(3, 60)]},
    {"min_new_tokens": 8},
    {"min_length": 128},
    {"min_new_tokens": 20, "forced_eos_token_id": 3},
    {"forced_bos_token_id": 9},
    {"exponential_decay_length_penalty": (1, 30.0)},
    {"sequence_bias": {(50,): 4.0, (12, 13): -3.0}},
]


def model_with(**options: Any) -> Any:
    model = tiny_model("llama")
    for name, value in {"eos_token_id": END, "pad_token_id": 0, **options}.items():
        setattr(model.generation_config, name, value)
    return model


def generated(model: Any, ids: list[int], new: int = 12) -> list[int]:
    ids_of_batch = torch.tensor([ids])
    out = model.generate(
        ids_of_batch,
        attention_mask=torch.ones_like(ids_of_batch),
        max_new_tokens=new,
        do_sample=False,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_every_door_answers_as_generate_does(options: dict[str, Any]) -> None:
    """A job's two questions in a row, compare, and ask, each with `exact`; a prompt that was compressed
    as `generate` inside `compress`."""
    model = model_with(**options)
    acting = acting_options(model.generation_config)
    assert list(acting) == [name for name in processors.NEUTRAL if name in options]
    turns = [prompt_ids(9, 1), prompt_ids(8, 2)]
    stopping = Stopping(12, frozenset({END}), processors=acting)
    methods = {name: (build_method(name), Budget(**SMALL)) for name in ("exact", "snapkv")}
    conversation = [Question(ids, stopping) for ids in turns]
    with kvbench_attention_on(model):
        (answers,) = generate(model, [Prompt(PROMPT, methods, "x", [conversation])], seed=0)
        (whole,) = generate(
            model, [Prompt(PROMPT, methods, "x", [[Question((), stopping)]])], seed=0
        )
    first = generated(model, [*PROMPT, *turns[0]])
    assert answers["exact"][0].chosen == first
    said = first[:-1] if first[-1] == END else first
    assert answers["exact"][1].chosen == generated(model, [*PROMPT, *turns[0], *said, *turns[1]])
    plain = generated(model, PROMPT)
    raw = generated(model_with(), PROMPT)
    assert (plain == raw) == (options.keys() <= {"forced_bos_token_id"}), "of one token alone"
    assert whole["exact"][0].chosen == plain
    with compress(model, "snapkv", **SMALL) as session:
        assert whole["snapkv"][0].chosen == generated(model, PROMPT)
    with compress(model, "exact") as session:
        context = session.read(PROMPT)
        answer = context.ask(turns[0], max_new_tokens=12, keep=True)
        assert answer == [token for token in first if token != END]
        then = [*PROMPT, *turns[0], *first, *turns[1]]
        expected = [token for token in generated(model, then) if token != END]
        assert context.ask(turns[1], max_new_tokens=12) == expected


def test_the_options_change_answers_and_a_switch_turns_them_off() -> None:
    text = "a fox and a hen " * 6
    raw: Any = compare(tiny_model("llama"), Letters(), text, ["exact"], max_new_tokens=16)
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 3.0
    on, off = (
        compare(model, Letters(), text, ["exact"], max_new_tokens=16, generation_config=switch)
        for switch in (True, False)
    )
    assert off["text"].tolist() == raw["text"].tolist() != on["text"].tolist()
    with compress(model, "exact") as session:
        context = session.read(text, Letters())
        on, off = (context.ask("?", generation_config=switch) for switch in (True, False))
        assert on != off == context.ask_all(["?"], generation_config=False)[0]


def test_what_changes_nothing_does_not_act() -> None:
    config = t.GenerationConfig(
        repetition_penalty=1.0, no_repeat_ngram_size=0, temperature=0.6, top_p=0.9, do_sample=True
    )
    assert acting_options(config) == {}
    biased = t.GenerationConfig(sequence_bias={(5, 6): 1.5}, bad_words_ids=[[3]])
    assert acting_options(biased) == {"sequence_bias": [[[5, 6], 1.5]], "bad_words_ids": [[3]]}


def test_a_job_reads_them_without_weights_and_names_them_in_its_identity(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 1.1
    model.config.save_pretrained(tmp_path)
    spec = ModelSpec(name="m", path=str(tmp_path))
    assert acting_options(load_generation_config(spec)) == {}
    model.generation_config.save_pretrained(tmp_path)
    acting = acting_options(load_generation_config(spec))
    assert acting == {"repetition_penalty": 1.1}
    before = make_job(tmp_path / "runs")
    job = make_job(tmp_path / "runs")
    job.session.__dict__["processors"] = acting
    assert job.settings["exact"]["generation_config"] == acting
    assert "generation_config" not in before.settings["exact"]
    assert job.folders["exact"] != before.folders["exact"]


def test_processed_steps_are_not_captured_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "table_change", lambda config: None)
    monkeypatch.setattr(steps, "is_hybrid", lambda config: False)
    on_gpu: Any = SimpleNamespace(
        parameters=lambda: [SimpleNamespace(device=torch.device("cuda"))],
        config=SimpleNamespace(get_text_config=lambda: None),
    )
    how = Steps("auto")
    assert how.should_capture(on_gpu, 64)
    with caplog.at_level(logging.WARNING):
        assert not how.should_capture(on_gpu, 64, ["repetition_penalty"])
        assert not how.should_capture(on_gpu, 64, ["repetition_penalty"])
    (said,) = caplog.messages
    assert "decodes without CUDA graphs, step by step: repetition_penalty of its gen" in said
