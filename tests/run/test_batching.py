"""Several prompts at once: the answers of one at a time, whatever the batch, and with memory short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from support.interpreted import DEVICE, HAVE_TRITON
from support.jobs import SMALL, Echo, Letters, make_job, records_of
from support.prompts import facts, methods, unlike_prompts
from support.tiny import Broken, tiny_model

from kvbench.engine import generate as engine
from kvbench.engine import memory
from kvbench.engine import rows as engine_rows
from kvbench.engine.generate import run_batch
from kvbench.engine.loading import ModelSpec
from kvbench.engine.stopping import Stopping
from kvbench.kv import KVError
from kvbench.methods import build_method
from kvbench.run.batching import AUTO_MOST, BatchSize, check_batch_size, groups, run_group
from kvbench.run.plan import Outcome, TaskPlan, Unit
from kvbench.run.runner import run_job
from kvbench.run.session import Session
from kvbench.tasks.base import Example, PromptEncoder


@pytest.mark.parametrize(
    ("architecture", "compress_after"),
    [("llama", "prompt"), ("llama", "context"), ("gemma3", "context"), ("opt", "prompt")],
)
def test_a_batch_answers_what_its_prompts_answer_alone(architecture, compress_after):
    model = tiny_model(architecture)
    model.set_attn_implementation("kvbench")
    prompts = unlike_prompts()
    how = {"seed": 3, "compress_after": compress_after}
    together = run_batch(model, prompts, **how)
    turned = run_batch(model, prompts[::-1], **how)[::-1]
    for prompt, answer, other in zip(prompts, together, turned, strict=True):
        alone = run_batch(model, [prompt], **how)[0]
        assert facts(answer) == facts(alone) == facts(other)
        assert {r.failure for r in answer.values()} == {None}
        assert {r.batch for r in answer.values()} == {4}
        assert {r.batch for r in alone.values()} == {1}
    lengths = {r.new_tokens for answer in together for r in answer.values()}
    assert len(lengths) > 3, "rows that all end together would test little"


def test_a_fork_that_fails_stops_no_other_prompt():
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    prompts = unlike_prompts()
    broken = {"broken": (Broken(), SMALL), "h2o": (build_method("h2o"), SMALL)}
    mixed = run_batch(model, [prompts[0], replace(prompts[2], methods=broken)], seed=0)
    assert "out of memory" in str(mixed[1]["broken"].failure)
    assert mixed[1]["h2o"].failure is None
    assert facts(mixed[0]) == facts(run_batch(model, prompts[:1], seed=0)[0])


def test_a_prompt_that_takes_too_long_is_a_timeout_and_its_neighbours_are_not():
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    patient, hasty = unlike_prompts()[0], unlike_prompts()[2]
    hasty = replace(hasty, stopping=Stopping(9, timeout_s=0.0))
    answers = run_batch(model, [patient, hasty], seed=0)
    assert {type(r.failure) for r in answers[1].values()} == {TimeoutError}
    assert {r.failure for r in answers[0].values()} == {None}


# Through the runner: records, batch sizes, memory.

NOT_SCORES = ("batch",)


@dataclass(frozen=True, kw_only=True)
class Unlike(Echo):
    """Examples that end at different tokens."""

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        return [
            replace(example, max_new_tokens=3 + 2 * (i % 3), stop=("A",) if i % 2 else ())
            for i, example in enumerate(super().examples(encoder))
        ]


def job(tmp_path, **changes):
    labels = changes.pop("labels", ("exact", "exact_4bit", "h2o", "balancekv", "snapkv"))
    timeout = changes.pop("example_timeout", None)
    picked = {label: method for label, method in methods().items() if label in labels}
    made = make_job(tmp_path, picked, echo=Unlike(count=7), **changes)
    session = replace(made.session, example_timeout=timeout)
    session.__dict__.update(made.session.__dict__ | {"example_timeout": timeout})
    return replace(made, session=session)


def scores(result):
    return {
        label: [{k: v for k, v in row.items() if k not in NOT_SCORES} for row in rows]
        for label, rows in records_of(result).items()
    }


def batches(result):
    return [row["batch"] for row in records_of(result)["exact"]]


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Collecting garbage takes longer than everything else here."""
    monkeypatch.setattr("kvbench.run.batching.free_memory", lambda device: None)
    monkeypatch.setattr("kvbench.run.attempts.free_memory", lambda device: None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the methods give of one prompt at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.run.attempts.free_memory", lambda device: None)
        return scores(run_job(job(tmp_path_factory.mktemp("alone"))))


def short_memory(monkeypatch, rows):
    """No forward pass of more than so many rows."""
    real = engine_rows.forward

    def forward(model, ids, positions, state):
        if ids.shape[0] > rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {ids.shape[0]} rows")
        return real(model, ids, positions, state)

    monkeypatch.setattr(engine_rows, "forward", forward)


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_records_are_the_same_at_any_batch_size(tmp_path, compress_after):
    one = run_job(job(tmp_path / "1", compress_after=compress_after))
    assert (one.failed, one.written) == (0, 35)
    assert batches(one) == [1] * 7
    for size, sizes in ((3, [3, 3, 3, 3, 3, 3, 1]), (50, [7] * 7), ("auto", [1, 2, 2, 4, 4, 4, 4])):
        result = run_job(job(tmp_path / str(size), compress_after=compress_after, batch_size=size))
        assert scores(result) == scores(one)
        assert batches(result) == sizes
        # not part of what names a run
        assert {f.name for f in result.folders.values()} == {f.name for f in one.folders.values()}


def test_the_manifest_says_which_batch_size_was_asked_for(tmp_path):
    from kvbench.records.read import load_run

    result = run_job(job(tmp_path, batch_size="auto", labels=("exact",)))
    assert load_run(result.folders["exact"]).manifest["batch_size"] == "auto"


def test_running_out_of_memory_halves_the_batch(tmp_path, monkeypatch, alone):
    short_memory(monkeypatch, rows=12)  # two prompts of five methods fit, three do not
    for size, sizes in ((4, [2, 2, 2, 2, 2, 2, 1]), ("auto", [1, 2, 2, 2, 2, 2, 2])):
        result = run_job(job(tmp_path / str(size), batch_size=size))
        assert result.failed == 0
        assert scores(result) == alone
        assert batches(result) == sizes


def test_methods_that_do_not_fit_together_run_one_by_one(tmp_path, monkeypatch, alone):
    short_memory(monkeypatch, rows=4)  # not even one prompt with its five methods
    got = scores(run_job(job(tmp_path / "4", batch_size=4, limit=3)))
    assert all(row.pop("retried") for rows in got.values() for row in rows)
    assert got == {label: rows[:3] for label, rows in alone.items()}


def test_what_does_not_fit_alone_is_recorded_as_out_of_memory(tmp_path, monkeypatch):
    short_memory(monkeypatch, rows=0)
    result = run_job(job(tmp_path, batch_size=4, limit=3, labels=("exact", "h2o")))
    assert result.failed == 6
    for label, rows in records_of(result).items():
        assert [(r["status"], r["example_id"]) for r in rows] == [
            ("oom", f"e{i}") for i in range(3)
        ], label


@pytest.mark.parametrize(
    ("size", "sizes"), [(4, [1, 2, 2, 4, 4, 4, 4]), ("auto", [1, 1, 2, 2, 3, 3, 3])]
)
def test_an_example_that_fits_nowhere_leaves_the_others_their_batches(
    tmp_path, monkeypatch, size, sizes
):
    real = engine.prefill

    def prefill(model, ids, forks, **options):
        if forks[0].example_id == "e1":
            raise MemoryError
        return real(model, ids, forks, **options)

    monkeypatch.setattr(engine, "prefill", prefill)
    few = replace(job(tmp_path, batch_size=size), plan=TaskPlan(Unlike(count=8)))
    records = records_of(run_job(few))
    for rows in records.values():
        assert {r["example_id"]: r["status"] for r in rows} == {
            f"e{i}": "oom" if i == 1 else "ok" for i in range(8)
        }
    assert [row["batch"] for row in records["exact"] if row["status"] == "ok"] == sizes


def test_a_batch_that_takes_too_long_runs_again_in_halves(tmp_path, monkeypatch):
    want = scores(run_job(job(tmp_path / "1", example_timeout=60.0)))
    real = engine_rows._time_out

    def strict(rows, elapsed):
        if len({row.fork.example_id for row in rows}) > 2:
            elapsed += 60.0
        real(rows, elapsed)

    monkeypatch.setattr(engine_rows, "_time_out", strict)
    result = run_job(job(tmp_path / "4", batch_size=4, example_timeout=60.0))
    assert scores(result) == want
    assert batches(result) == [2, 2, 2, 2, 1, 1, 1]


def test_a_method_that_never_fits_costs_the_others_nothing_but_time(tmp_path):
    with_broken = {"exact": build_method("exact"), "broken": Broken()}
    one = run_job(make_job(tmp_path / "1", with_broken, echo=Unlike(count=5)))
    four = run_job(make_job(tmp_path / "4", with_broken, echo=Unlike(count=5), batch_size=4))
    assert scores(four) == scores(one)
    assert {row["status"] for row in records_of(four)["broken"]} == {"oom"}


def test_an_example_that_fails_as_a_whole_fails_alone(tmp_path):
    made = []
    for size in (1, 4):
        one = job(tmp_path / str(size), batch_size=size)
        weights = one.session.model.model.embed_tokens.weight
        with torch.no_grad():
            weights[Letters().encode("z")[0]] = float("nan")

        @dataclass(frozen=True, kw_only=True)
        class OneBad(Unlike):
            def examples(self, encoder):
                examples = list(super().examples(encoder))
                examples[2] = replace(examples[2], context=examples[2].context + "z")
                return examples

        made.append(scores(run_job(replace(one, plan=type(one.plan)(OneBad(count=7))))))
    assert made[0] == made[1]
    for label, rows in made[1].items():
        assert [r["status"] for r in rows] == ["ok"] * 2 + ["error"] + ["ok"] * 4, label
        assert "not finite" in rows[2]["error"]


def test_a_batched_run_goes_on_where_it_was_cut_off(tmp_path, alone):
    run_job(job(tmp_path / "cut", labels=("exact",), limit=2))
    run_job(job(tmp_path / "cut", labels=("exact", "h2o"), limit=3, batch_size=2))
    result = run_job(job(tmp_path / "cut", batch_size=3))
    assert scores(result) == alone
    assert run_job(job(tmp_path / "cut", batch_size="auto")).written == 0


def test_records_of_a_batch_are_written_before_the_next_begins(tmp_path, monkeypatch):
    seen, real = [], engine.prefill
    folder = tmp_path / "e"

    def prefill(model, ids, forks, **options):
        seen.append(sum(f.read_bytes().count(b"\n") for f in folder.rglob("records.jsonl")))
        return real(model, ids, forks, **options)

    monkeypatch.setattr(engine, "prefill", prefill)
    run_job(job(tmp_path, batch_size=3, labels=("exact", "h2o")))
    assert seen == [0, 0, 0, 6, 6, 6, 12]


# The size itself.


def fake_memory(monkeypatch, *, per_unit, weights=10, total=100):
    running = [1]
    monkeypatch.setattr(memory, "reset_peak", lambda device: True)
    monkeypatch.setattr(memory, "used_bytes", lambda device: weights)
    monkeypatch.setattr(memory, "peak_bytes", lambda device: weights + per_unit * running[0])
    monkeypatch.setattr(memory, "total_bytes", lambda device: total)
    return running


class Counting:
    """A plan that only counts the units of each group."""

    def __init__(self, running=None):
        self.groups, self.running = [], running

    def meta(self):
        return {}

    def units(self, session, methods):
        return []

    def run(self, unit, methods, session):
        return iter(self.run_batch([(unit, methods)], session)[0])

    def run_batch(self, work, session):
        self.groups.append(len(work))
        if self.running is not None:
            self.running[0] = len(work)
        return [[Outcome("m", unit.id, {"status": "ok"})] for unit, _ in work]


def sizes_of(setting, count, running=None):
    session = Session(ModelSpec(name="none", path="none"), torch.device("cpu"), torch.float32)
    size, plan = BatchSize(setting, session.device), Counting(running)
    work = [(Unit(f"u{i}", (f"u{i}",), None), {"m": None}) for i in range(count)]
    told = [
        outcomes[0].example_id
        for group in groups(work, size, plan)
        for outcomes in run_group(plan, group, session, size, lambda outcomes: None)
    ]
    assert told == [unit.id for unit, _ in work]
    return plan.groups


def test_auto_doubles_until_twice_the_need_would_not_fit(monkeypatch):
    running = fake_memory(monkeypatch, per_unit=8)
    # 10 + 8 * 8 = 74 fits in 85 of 100, 16 units would not
    assert sizes_of("auto", 40, running) == [1, 2, 4, 8, 8, 8, 8, 1]
    running = fake_memory(monkeypatch, per_unit=0)
    assert max(sizes_of("auto", 500, running)) == AUTO_MOST
    running = fake_memory(monkeypatch, per_unit=60)
    assert sizes_of("auto", 3, running) == [1, 1, 1]
    assert sizes_of(4, 9) == [4, 4, 1]


def test_auto_risks_nothing_where_memory_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(memory, "reset_peak", lambda device: False)
    assert sizes_of("auto", 3) == [1, 1, 1]


@pytest.mark.parametrize("value", [0, -1, "many", 1.5, True, None])
def test_batch_size_is_a_number_or_auto(value):
    with pytest.raises(KVError, match=r"batch_size is .*; allowed: an integer >= 1, or auto"):
        check_batch_size(value)


def test_memory_is_measured_or_not_claimed():
    cpu = torch.device("cpu")
    if not memory.reset_peak(cpu):
        pytest.skip("the peak of a process can be reset on Linux only")
    before = memory.used_bytes(cpu)
    filled = torch.ones(40_000_000)
    assert memory.peak_bytes(cpu) >= before + filled.nbytes * 0.9
    del filled
    assert memory.reset_peak(cpu)
    assert memory.peak_bytes(cpu) < before + 80_000_000
    assert memory.total_bytes(cpu) > memory.used_bytes(cpu)


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the package triton")
def test_a_batch_decodes_alike_through_the_triton_kernels(monkeypatch):
    """Rows of different methods and lengths, evicted entries and weights: the whole way to the
    kernels that run on a GPU (here interpreted; only the decoding, prefill's have their own tests)."""
    model = tiny_model("llama").to(DEVICE)
    model.set_attn_implementation("kvbench")
    picked = {label: (methods()[label], SMALL) for label in ("exact", "h2o", "uniform")}
    prompts = [
        replace(prompt, methods=picked, stopping=Stopping(3 + i))
        for i, prompt in enumerate(unlike_prompts()[:2])
    ]
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    want = run_batch(model, prompts, seed=1)
    real = engine.decode_rows

    def decode(*arguments):
        with monkeypatch.context() as during:
            during.setenv("KVBENCH_KERNELS", "triton")
            real(*arguments)

    monkeypatch.setattr(engine, "decode_rows", decode)
    got = run_batch(model, prompts, seed=1)
    for one, other in zip(got, want, strict=True):
        assert facts(one) == facts(other)
        assert {r.failure for r in one.values()} == {None}


def test_kernels_are_launched_once_before_anything_is_clocked(tmp_path, monkeypatch):
    """On a GPU: a kernel's first launch compiles it. Every method once, of the first prompt; nothing is
    recorded of it."""
    from kvbench.run import plan as plans

    job = make_job(tmp_path, echo=Echo(count=2))
    session = replace(job.session, device=torch.device("cuda"))
    session.__dict__.update(job.session.__dict__ | {"device": torch.device("cuda")})
    units = job.plan.units(session, job.methods)
    runs, real = [], plans.run_conversations

    def run(model, prompts, **how):
        runs.append([p.conversations[0][0].stopping.max_new_tokens for p in prompts])
        assert {label for p in prompts for label in p.methods} == set(job.methods)
        if len(runs) == 1:
            raise RuntimeError("out of memory")
        return real(model, prompts, **how)

    monkeypatch.setattr(plans, "run_conversations", run)
    for unit in units:
        outcomes = job.plan.run_batch([(unit, job.methods)], session)
        assert [o.fields["status"] for o in outcomes[0]] == ["ok"] * 3
    assert runs == [[2], [6], [6]]
