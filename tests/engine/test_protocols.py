"""When a prompt is compressed (`compress_after`): every door gives the same tokens, and what is judged
comes from the compressed cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.asking import Prompt, generate_each, teacher_forced
from support.command import job_of
from support.forward import reference
from support.generation import Letters, tiny_model
from support.jobs import Echo, make_job, records_of
from support.paths import ROOT
from support.tiny import CHANGE, model_with_table, on_kvbench, prompt_ids
from torch import Tensor

from kvbench import compare, compress, kept
from kvbench.engine import ask as asking
from kvbench.engine.answer import Stopping
from kvbench.engine.rotary import has_table_of
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.probes.fidelity import FidelityProbe
from kvbench.run.runner import run_job
from kvbench.tasks.base import Example

SMALL = Budget(rate=0.25, sink=4, window=4)
TEXT = "the quick brown fox jumps over the lazy dog " * 2


@dataclass(frozen=True, kw_only=True)
class Noise(Method):
    """Keeps every key, with values that are drawn."""

    saves_memory: ClassVar[bool] = False

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        drawn = torch.randn(layer.values.shape, generator=generator)
        return keep_all(replace(layer, values=4 * layer.values.std() * drawn))


@pytest.fixture
def first_logits(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The logits from which first tokens of answers are chosen, by label."""
    seen: list[dict[str, Tensor]] = []
    real = asking.pick

    def pick(turns: Any, logits: Tensor, draws: Any) -> Tensor:
        if not turns[0].answer.chosen:
            seen.append({turn.row.label: own for turn, own in zip(turns, logits, strict=True)})
        return real(turns, logits, draws)

    monkeypatch.setattr(asking, "pick", pick)
    return seen


def nats(one: Tensor, other: Tensor) -> float:
    """The largest difference of two next-token log-probabilities."""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).abs().max())


BOTH: dict[str, Method] = {"exact": build_method("exact"), "noise": Noise()}


def by_job(folder: Path, **changes: Any) -> None:
    run_job(make_job(folder, BOTH, limit=1, **changes))


DOORS: dict[str, Callable[[Path], Any]] = {
    "job": by_job,
    "job, context": lambda folder: by_job(folder, compress_after="context"),
    "compare": lambda folder: compare(tiny_model("llama"), Letters(), TEXT, BOTH),
    "fidelity": lambda folder: by_job(folder, plan=FidelityProbe(prompts=Echo(), tokens=2)),
}


@pytest.mark.parametrize("door", ["job", "job, context", "compare"])
def test_the_first_token_comes_from_the_compressed_cache(
    door: str, first_logits: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    DOORS[door](tmp_path)
    for seen in first_logits:
        assert nats(seen["exact"], seen["noise"]) > 1
    assert first_logits


def test_under_the_papers_protocol_it_does_not(
    first_logits: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    by_job(tmp_path, compress_after="prompt")
    exact, noise = first_logits
    assert torch.equal(exact["exact"], noise["noise"])


def test_a_question_and_a_likelihood_are_judged_by_the_compressed_cache(
    first_logits: list[dict[str, Tensor]],
) -> None:
    model = tiny_model("llama")
    for method in BOTH.values():
        with compress(model, method, sink=4, window=4) as session:
            session.read(prompt_ids(60)).ask(prompt_ids(3), max_new_tokens=1)
    exact, noise = ({**seen}.popitem()[1] for seen in first_logits)
    assert nats(exact, noise) > 1
    scored = teacher_forced(model, prompt_ids(60), prompt_ids(2), {"noise": (Noise(), SMALL)})
    assert scored["noise"].kl[0] > 1


@dataclass(frozen=True, kw_only=True)
class Letter(Echo):
    """Prompts whose answer is one letter, decided by the first token."""

    length: int = 1

    def examples(self, encoder: Any) -> Sequence[Example]:
        return [replace(e, max_new_tokens=self.length) for e in super().examples(encoder)]

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        return {"score": float(len(prediction) > 0 and prediction[0] in "aeiouyAEIOU")}


def test_answers_of_one_token_are_refused_where_they_are_the_exact_caches(tmp_path: Path) -> None:
    one = {"echo": Letter(), "compress_after": "prompt"}
    with pytest.raises(KVError, match=r"max_new_tokens 1: that token is the exact cache's"):
        run_job(make_job(tmp_path, BOTH, **one))
    run_job(make_job(tmp_path, {"exact": BOTH["exact"]}, **one))
    assert run_job(make_job(tmp_path, BOTH, echo=Letter())).failed == 0


def test_a_record_says_what_was_held_back_and_what_its_first_token_decided(tmp_path: Path) -> None:
    held = {"all_but_last": 1, "context": len("what next? "), "prompt": 0}
    for protocol, tokens in held.items():
        made = make_job(tmp_path, BOTH, echo=Letter(length=3), compress_after=protocol)
        for rows in records_of(run_job(made)).values():
            assert [row["held_back"] for row in rows] == [tokens] * 4
            # the score is the first letter's alone
            decided = [row["score"] if protocol == "prompt" else None for row in rows]
            assert [row["first_token_score"] for row in rows] == decided


def texts(protocol: str, folder: Path) -> dict[str, str]:
    """The answers of `snapkv` to one prompt by every door."""
    echo = Echo(count=1)
    made = make_job(folder, {"snapkv": build_method("snapkv")}, echo=echo, compress_after=protocol)
    record = records_of(run_job(made))["snapkv"][0]
    (example,) = echo.examples(made.session.encoder)
    prompt, model = example.context + example.question, tiny_model("llama")
    how: dict[str, Any] = {"sink": 4, "window": 4, "rate": 0.25}
    found = {"job": record["prediction"]}
    if protocol != "context":
        frame: Any = compare(
            *(model, Letters(), prompt, "snapkv"), max_new_tokens=6, compress_after=protocol, **how
        )
        found["compare"] = frame.loc["snapkv", "text"]
        assert frame.loc["snapkv", "bytes"] == record["cache_bytes"]
        shown = kept(model, Letters(), prompt, "snapkv", compress_after=protocol, **how)
        by_head = shown.groupby(["layer", "head"]).size()
        assert by_head.max() == record["entries"]["max"]
        assert shown["position"].max() < len(prompt) - record["held_back"]
    with compress(model, "snapkv", **how) as session:
        if protocol == "prompt":
            ids = torch.tensor([Letters().encode(prompt)])
            out = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
            found["compress"] = Letters().decode(out.tolist())
        else:
            first, rest = prompt[: -record["held_back"]], prompt[-record["held_back"] :]
            ids = session.read(Letters().encode(first)).ask(
                Letters().encode(rest), max_new_tokens=6
            )
            found["read().ask()"] = Letters().decode(ids)
    return found


@pytest.mark.parametrize("protocol", ["all_but_last", "context", "prompt"])
def test_every_door_gives_the_same_answer(protocol: str, tmp_path: Path) -> None:
    found = texts(protocol, tmp_path)
    assert len(set(found.values())) == 1, found
    assert len(found) == 2 + (protocol != "context")


# --- exact is never another, nor impossible ---------------------------------------------------------


@pytest.mark.parametrize(
    "n", [CHANGE - 8, CHANGE, CHANGE + 1, CHANGE + 2, round(1.1 * CHANGE), 1, 2]
)
@pytest.mark.parametrize("kind", ["longrope", "dynamic", "default"])
def test_exact_is_generate_on_both_sides_of_a_change_of_the_rotary_table(kind: str, n: int) -> None:
    model, ids = model_with_table(kind), prompt_ids(n)
    new = 1 if kind == "longrope" and n == CHANGE else 6  # an answer must not cross
    expected = reference(model, ids, new)
    methods = {name: (build_method(name), SMALL) for name in ("exact", "snapkv", "h2o", "kvzip")}
    methods["kvzip"] = (build_method("kvzip", instructed=False, chunk=20), SMALL)
    on_kvbench(model)
    asked = Prompt.of(ids, (), methods, Stopping(new), "x", compress_after="all_but_last")
    (answers,) = generate_each(model, [asked], seed=0)
    crosses = kind == "longrope" and n in (CHANGE - 8, CHANGE)  # what it repeats, that is
    for label, answer in answers.items():
        assert (answer.failure is None) != (crosses and label == "kvzip"), (label, answer.failure)
        if answer.failure is None:
            assert answer.cost.prompt_tokens == max(1, n - 1)
            assert answer.cost.compressed == (label != "exact" and n > 20)
    assert answers["exact"].tokens == expected
    if n == 1:
        assert all(answer.tokens == expected for answer in answers.values())


def test_a_prefix_is_shown_as_it_is_in_the_whole_prompt() -> None:
    """Where the tables differ, a method sees the prefix of the whole prompt's pass."""
    model = on_kvbench(model_with_table("dynamic"))
    assert has_table_of(model.config, CHANGE - 1, CHANGE)
    assert not has_table_of(model.config, CHANGE, CHANGE + 1)
    longrope = model_with_table("longrope").config
    assert has_table_of(longrope, CHANGE + 1, CHANGE + 2)
    assert not has_table_of(longrope, CHANGE, CHANGE + 1)
    seen: list[LayerKV] = []

    @dataclass(frozen=True, kw_only=True)
    class Looks(Method):
        def compress(self, layer: LayerKV, *_: Any) -> CompressedKV:
            seen.append(layer)
            raise RuntimeError("seen")

    for held_back in (0, 1):
        looking = {"x": (Looks(), SMALL)}
        asking.read(model, prompt_ids(90), looking, seed=0, name="x", held_back=held_back)
    whole, part = seen
    assert (whole.n, part.n) == (90, 89)
    for name in ("keys", "values", "queries"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, :, :89]), name
    assert whole.rotary is not None
    assert part.rotary is not None
    positions = torch.arange(4)
    assert torch.equal(whole.rotary(positions)[0], part.rotary(positions)[0])


def test_other_protocols_are_refused_where_a_door_has_them_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(KVError, match=r"session.read\(context\).ask\(question\) inside compress"):
        compare(model, Letters(), TEXT, "exact", compress_after="context")
    with pytest.raises(KVError, match="compare has 'all_but_last'"):
        compress(model, "exact", compress_after="all_but_last")
    with pytest.raises(KVError, match="fidelity compares every token; allowed: all_but_last"):
        by_job(tmp_path, plan=FidelityProbe(prompts=Echo()), compress_after="prompt")


# --- tasks ------------------------------------------------------------------------------------------

OFFLINE: dict[str, tuple[str, ...]] = {
    "longeval_lines": ("task.num_lines=[6]",),
    "longeval_lines_context": ("task.num_lines=[6]",),
    "needle_questions": ("task.lengths=[300]",),
    "ruler": ("task.lengths=[600]", "task.tasks=[niah_single_1]"),
    "jsonl": (
        f"task.files=[{ROOT}/tests/data/benchmarks/gsm8k.jsonl]",
        "task.fields.context=question",
        "task.fields.answers=answer",
        "task.max_new_tokens=2",
    ),
}
"""A prompt of one part, a context, several questions about one, a prompt that opens the answer, rows of
one's own."""
ENDS = ("budget.sink=2", "budget.window=2")


@pytest.mark.parametrize("task", OFFLINE)
def test_the_first_token_of_a_task_comes_from_the_compressed_cache(
    task: str, first_logits: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    words = ("model=recall_mini", "method=[exact,uniform]", "logger=none", "limit=1", *ENDS)
    where = f"results_dir={tmp_path}"
    made = job_of(f"task={task}", f"task_label={task}", *words, where, *OFFLINE[task])
    noisy = {**made.methods, "uniform": (Noise(), made.methods["uniform"][1])}
    result = run_job(replace(made, methods=noisy))
    assert result.failed == 0
    assert first_logits
    for seen in first_logits:
        for label in (label for label in seen if label.startswith("uniform")):
            exact = next(own for other, own in seen.items() if other.startswith("exact"))
            assert nats(exact, seen[label]) > 1
