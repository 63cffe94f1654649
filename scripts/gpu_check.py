"""The first half hour on a GPU: is what kvbench computes, times and counts there right?

    make gpu-check      # or these three, each of which takes at most ten minutes:
    python scripts/gpu_check.py --only device,tokens,kernels,throughput
    python scripts/gpu_check.py --only decoding,capacity
    python scripts/gpu_check.py --only second,tests

A call writes <--out>/<device>-<first section>.json (runs/gpu) after each of its sections, with every
figure beside its limit or its goal, and stops LIMIT seconds after the process has begun. The exit status
is 1 if a figure is beyond its limit, which means that something is wrong. A goal that is missed is
printed and fails nothing, and so is what there was too little time or memory for. scripts/README.md says
what each figure would falsify. `--small` takes sizes for a pretended GPU, whose clock means nothing.
"""

# ruff: noqa: E402 - benchmarks/ is a folder of scripts

from __future__ import annotations

import os
import time

BEGAN = time.perf_counter()
"""When this process began; what it imports counts."""
# torch reads this when it is imported (the second name before 2.9). Without it the allocator rounds
# every tensor of a cache up to a part of a fixed segment, so that less fits than the bytes allow.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "benchmarks")]

import torch
from _shared import LLAMA_8B, SHIPPED
from bench_engine import Clocked

from kvbench.engine import captured
from kvbench.engine.answer import Answer, Stopping
from kvbench.engine.architecture import switch_to_kvbench
from kvbench.engine.ask import Question, answer_each, converse, read
from kvbench.engine.decode import Turn
from kvbench.engine.device import free_memory, is_out_of_memory
from kvbench.engine.model import ModelSpec, load_model
from kvbench.engine.prefill import prefill
from kvbench.engine.row import Row
from kvbench.engine.steps import FIRST_STEPS, Steps
from kvbench.errors import UserError, one_line
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kernels.decode import RowPointers, weighted_decode_attention
from kvbench.kv import Budget
from kvbench.methods import available_methods, build_method
from kvbench.probes.throughput import largest_batch
from kvbench.run import provenance

METHODS = ("exact", "snapkv", "h2o", "balancekv", "subgen")
"""The methods whose speed and memory are measured."""
RATE = 0.25
"""The rate at which they are measured."""
WALL_SHARE, WALL_SECONDS = 0.10, 0.05
"""How much longer the wall seconds of a generation may be than the sum of its parts, as a share of that
sum, and in seconds, which Python takes between the parts; the larger of the two counts."""
CEILING = 1.05
"""The largest decode speed-up, over the one that the bytes read per token allow; a larger one means that
a clock is wrong."""
GOAL = 0.8
"""Goal: the share of that ceiling that a decode step reaches, and of the copy rate that its kernel
reaches."""
COMPRESSION = 0.02
"""Goal: the largest ratio of the seconds of compression to those of the prefill."""
CAPACITY = 3.0
"""Goal: the smallest ratio of a method's largest batch to exact's. A rate of 1/4 allows about 3.4, since
a prompt that is read needs memory of its own."""
BYTES = 0.10
"""How far the memory of one more row may be from the bytes that its cache should have, as a share of
these."""
LIMIT = 560.0
"""Seconds after the process has begun at which the section that runs is stopped; no other is begun."""
TESTS = "-m cuda tests/kernels tests/engine/test_cuda.py tests/engine/test_decode_steps.py"
"""Every kernel against float64 at several shapes, and decoding steps."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """The sizes of what the sections measure; `timed` is False where the clock means nothing."""

    copy: int = 1 << 30
    matmul: int = 8192
    prompt: int = 900
    kernels: tuple[int, int] = (16384, 64)  # tokens, rows
    model: dict[str, Any] = field(default_factory=lambda: LLAMA_8B)
    contexts: tuple[int, ...] = (4096, 32768)
    decoding: tuple[tuple[int, tuple[int, ...]], ...] = ((32768, (1, 8, 16)), (131072, (1,)))
    """Tokens and batches."""
    new_tokens: int = 64
    capacity: int = 16384  # tokens
    most_batch: int = 1024
    timed: bool = True


SMALL_LLAMA = LLAMA_8B | {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL = Sizes(
    copy=1 << 16,
    matmul=32,
    prompt=60,
    kernels=(256, 2),
    model=SMALL_LLAMA,
    contexts=(100,),
    decoding=((100, (1, 2)),),
    new_tokens=24,
    capacity=100,
    most_batch=3,
    timed=False,
)


class OutOfTime(BaseException):
    """The time of this call is over. No `Exception`, which a row would take for its own failure."""


@dataclass
class Figures:
    """The figures of a section.

    Attributes:
        timed: whether limits and goals on what a clock says count.
        measured: figures by name; those that were checked with their limit or goal.
        wrong, short: a line for each figure beyond its limit, and for each goal that is missed.
        left_out: by name, the reason why something was not measured.
    """

    timed: bool = True
    measured: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def check(
        self,
        name: str,
        measured: float,
        *,
        most: float | None = None,
        least: float | None = None,
        goal: bool = False,
        clock: bool = False,
    ) -> None:
        """Note a figure that must not be above `most`, or below `least`; with `goal` it only should
        not. With `clock` nothing follows where the clock means nothing."""
        side, bound = ("at_least", least) if most is None else ("at_most", most)
        assert bound is not None
        within = measured <= bound if side == "at_most" else measured >= bound
        if not within and (self.timed or not clock):
            lines = self.short if goal else self.wrong
            lines.append(f"{name}: {measured:.3g}, {side.replace('_', ' ')} {bound:.3g}")
        key = f"goal_{side}" if goal else side
        self.measured[name] = {"measured": measured, key: bound}

    @contextmanager
    def memory_for(self, name: str) -> Iterator[None]:
        """Within the context, running out of memory is noted, and `name` is left out."""
        try:
            yield
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            self.left_out[name] = one_line(failure)


COMPILED: list[float] = []
"""The seconds of each Triton kernel that was compiled, or read from the disk, by this process."""


def note_compiled(*, src: Any, times: Any, **_: Any) -> None:
    """Triton calls this after it has compiled a kernel."""
    COMPILED.append(times.total / 1e6)


def weight_bytes(shape: Mapping[str, Any]) -> int:
    """Bytes of a Llama's weights that a decode step reads, at two bytes a number: all but the embedding,
    of which a step reads one row."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = 2 * hidden * hidden * (heads + kv_heads) // heads
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    return 2 * (layers * layer + hidden + shape["vocab_size"] * hidden)


def cache_bytes(shape: Mapping[str, Any], tokens: int) -> int:
    """Bytes of the exact cache of so many tokens, in two bytes a number."""
    key_size = shape["hidden_size"] * shape["num_key_value_heads"] // shape["num_attention_heads"]
    return int(2 * 2 * shape["num_hidden_layers"] * key_size * tokens)


def ceiling(weights: int, exact: float, compressed: float, batch: int) -> float:
    """The decode speed-up that bytes allow: a step of `batch` rows reads the weights once and every
    row's cache, whose bytes are `exact` without compression and `compressed` with it."""
    return (weights + batch * exact) / (weights + batch * compressed)


def random_ids(model: Any, n: int, batch: int = 1, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, n), generator=generator).tolist()


def seconds(run: Callable[[], object], calls: int = 10, rounds: int = 3) -> float:
    """Seconds that `run` takes on the device: the least, over the rounds, of the mean of `calls` calls.
    A captured graph of it is replayed, so that the time that Python takes to launch does not count."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seconds_a_call = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds_a_call.append(start.elapsed_time(end) / 1000 / calls)
    return min(seconds_a_call)


# --- sections ------------------------------------------------------------------------------------


def device(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Versions and clocks, and what the device copies and multiplies a second."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    query = f"nvidia-smi --query-gpu={fields} --format=csv"
    answer = subprocess.run(query, shell=True, capture_output=True, text=True).stdout
    copied, multiplied = _rates(sizes, on)
    properties = torch.cuda.get_device_properties(on)
    out.measured |= {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "gpus": torch.cuda.device_count(),
        "nvidia_smi": answer.split("\n"),
        "versions": provenance.versions() | {"cuda": torch.version.cuda},
        "cudnn": torch.backends.cudnn.version(),
        "copy_bytes_per_s": copied,
        "matmul_flops_per_s": multiplied,
    }


@cache
def _rates(sizes: Sizes, on: torch.device) -> tuple[float, float]:
    """Bytes a second that the device reads and writes when it copies, and floating-point operations a
    second of its matrix products."""
    source = torch.zeros(sizes.copy, dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    a = torch.ones(sizes.matmul, sizes.matmul, device=on, dtype=torch.bfloat16)
    copying, multiplying = seconds(lambda: target.copy_(source)), seconds(lambda: a @ a)
    return 2 * sizes.copy / copying, 2 * sizes.matmul**3 / multiplying


def tests(arguments: str, out: Figures) -> None:
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    out.measured["said"] = done.stdout[-4000:]
    out.check("tests passed", int(passed[1]) if passed else 0, least=1)
    out.check("exit status of pytest", done.returncode, most=0)


def tokens(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Every method on the shipped model in float32 answers the same tokens as on the CPU."""
    methods: dict[str, tuple[Any, Budget]] = {}
    for name in available_methods():
        try:
            methods[name] = (build_method(name), Budget(rate=0.25, sink=8, window=16))
        except UserError as reason:
            out.left_out[name] = one_line(reason)

    def answers(place: torch.device) -> dict[str, Answer]:
        model = load_model(SHIPPED, device=place, dtype=torch.float32)
        switch_to_kvbench(model)
        (ids,) = random_ids(model, sizes.prompt, seed=1)
        stopping = Stopping(8 if sizes.timed else 2)
        room = stopping.max_new_tokens
        reading = read(model, ids, methods, seed=0, name="gpu_check", room=room)
        return answer_each(model, reading, Question((), stopping))

    on_cpu, on_device = answers(torch.device("cpu")), answers(on)
    for name, result in on_cpu.items():
        other = on_device[name]
        if isinstance(result.failure, UserError):
            # A package that is not there, or what the method cannot do with this prompt.
            out.left_out[name] = one_line(result.failure)
        elif failure := result.failure or other.failure:
            out.wrong.append(f"{name}: {one_line(failure)}")
        elif other.tokens != result.tokens:
            out.wrong.append(f"{name}: {other.tokens}, the CPU {result.tokens}")
    out.measured["methods"] = sorted(set(methods) - set(out.left_out))


class Case(NamedTuple):
    """A kernel to time: the bytes that it has to read and write, its multiplications and additions, and
    the share of its measured time that the least time for these should be (an expectation)."""

    name: str
    run: Callable[[], object]
    bytes: int
    flops: int
    share: float


def cases(n: int, rows: int, on: torch.device) -> Iterator[Case]:
    """Kernels over n tokens of 8 KV heads of 128 numbers, of groups of 4, as in Llama-3.1-8B."""
    heads, dim, b = 8, 128, 128
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(on, dtype)

    keys, values = normal(1, heads, n, dim), normal(1, heads, n, dim)
    order = torch.arange(n, device=on).expand(1, heads, n).contiguous()
    blocks, draws = order.view(1, heads, n // b, b), torch.rand(1, heads, n // b, b).to(on)
    yield Case(
        f"balanced_halving n={n}",
        lambda: balanced_walk(keys, values, blocks, draws, gamma=4.0, offset=0.025),
        heads * n * (4 * dim + 5),
        heads * n * 4 * b * dim,
        0.05,
    )
    positive, ones = normal(1, heads, n) > 0, torch.ones(1, heads, n, device=on)
    yield Case(f"cut n={n}", lambda: halve(positive, order, ones), heads * n * 19, 0, 0.01)
    scaling = dim**-0.5
    yield Case(
        f"attention_mass n={n}",
        lambda: attention_mass(keys, keys, scaling=scaling),
        heads * n * (4 * dim + 4),
        heads * n * (n + 1) * dim,
        0.15,
    )
    held = n // 4
    buffers = [normal(heads, held, dim) for _ in range(2 * rows)]
    table = RowPointers(buffers[:rows], buffers[rows:])
    query = normal(rows, 4 * heads, dim)
    lengths = torch.full((rows,), held, dtype=torch.int32).to(on)
    for mass in (False, True):
        yield Case(
            f"decode_attention rows={rows} entries={held}{' mass' if mass else ''}",
            partial(
                weighted_decode_attention, query, table, lengths, scaling=scaling, return_mass=mass
            ),
            rows * heads * held * 4 * dim,
            rows * heads * held * 16 * dim,
            0.4,
        )


def kernels(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Each kernel against the least time its bytes and products take."""
    copied, multiplied = _rates(sizes, on)
    for case in cases(*sizes.kernels, on):
        measured = seconds(case.run, *((10, 3) if sizes.timed else (1, 1)))
        floor = max(case.bytes / copied, case.flops / multiplied)
        share = floor / measured
        out.measured[f"{case.name}: seconds"] = measured
        out.check(f"{case.name}: share of the floor", share, least=case.share, clock=True)
        if case.name.startswith("decode_attention"):
            share = case.bytes / copied / measured
            name = f"{case.name}: share of the copy rate"
            out.check(name, share, least=GOAL, goal=True, clock=True)


@cache
def _llama(sizes: Sizes, on: torch.device) -> Any:
    """The model of the sections that time: random weights of `sizes.model`'s shape in bfloat16."""
    spec = ModelSpec(name="llama", path="random", random_weights=True, architecture=sizes.model)
    model = load_model(spec, device=on, dtype=torch.bfloat16)
    switch_to_kvbench(model)
    return model


def _generated(
    model: Any, n: int, new: int, name: str, graphs: Steps, batch: int = 1
) -> tuple[list[Answer], float]:
    """The answers of a method to `batch` random prompts of n tokens, `new` tokens each, and the wall
    seconds of prefill, compression and decoding."""
    methods = {name: (build_method(name), Budget(rate=RATE))}
    prompts = random_ids(model, n, batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    talks = [
        (read(model, ids, methods, seed=0, name=f"p{i}", room=new), [[Question((), Stopping(new))]])
        for i, ids in enumerate(prompts)
    ]
    answers = converse(model, talks, seed=0, steps=graphs)
    results = [one for answer in answers for one in answer[name]]
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    for result in results:
        if result.failure is not None:
            raise result.failure
    return results, wall


def throughput(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Seconds of exact and snapkv: do the parts add up to the wall seconds, and was nothing compiled
    meanwhile? And those of a model that torch has compiled for its steps."""
    model, decode_s = _llama(sizes, on), {}
    short = sizes.contexts[0]
    runs = [(n, name, "auto") for n, name in product(sizes.contexts, ("exact", "snapkv"))]
    for n, name, how in [*runs, (short, "snapkv", "compiled")]:
        case, graphs = f"{name} at {n}, decode={how}", Steps(how)
        _generated(model, min(n, 1024), 24, name, graphs)
        free_memory(on)
        before = len(COMPILED)
        (result,), wall = _generated(model, n, sizes.new_tokens, name, graphs)
        parts = {
            part: getattr(result.cost, part) for part in ("prefill_s", "compress_s", "decode_s")
        }
        out.measured[case] = parts
        decode_s[n, name, how] = parts["decode_s"]
        together = sum(parts.values())
        most = max(WALL_SHARE * together, WALL_SECONDS)
        out.check(f"{case}: wall seconds beyond its parts", wall - together, most=most, clock=True)
        if how == "auto":
            compiled = len(COMPILED) - before
            out.check(f"{case}: kernels compiled inside the clock", compiled, most=0)
            out.check(f"{case}: steps that could not be captured", graphs.failed, most=0)
    ratio = decode_s[short, "snapkv", "compiled"] / decode_s[short, "snapkv", "auto"]
    out.check("compiled steps over others", ratio, most=1, goal=True, clock=True)


def _read(model: Any, n: int, name: str, room: int, seed: int = 0) -> tuple[Row, int, float]:
    """A method's cache of one random prompt of n tokens, the first new token, the prefill's seconds."""
    (ids,) = random_ids(model, n, seed=seed)
    row = Row(name, build_method(name), Budget(rate=RATE), 0, f"p{seed}", room=room)
    reading = prefill(model, ids, [row])
    if row.failure is not None:
        raise row.failure
    assert reading.logits is not None
    return row, int(reading.logits.argmax()), reading.prefill_s


@torch.inference_mode()
def _decoded(model: Any, rows: list[Row], token: int, new: int, graphs: Steps) -> list[float]:
    """The seconds of each decode step that the rows take together, of so many new tokens."""
    clocked = Clocked(new)
    turns = [
        Turn(row, Answer(Stopping(new) if place else clocked)) for place, row in enumerate(rows)
    ]
    for turn in turns:
        turn.answer.take(token)
    captured.decode(model, turns, graphs)
    for row in rows:
        if row.failure is not None:
            raise row.failure
    return [after - before for before, after in pairwise(clocked.times)]


def decoding(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Each method's compression beside its prefill, its decode steps at several batches beside what
    their bytes allow, and what one more row takes: copies of one cache decode together."""
    model, graphs, new = _llama(sizes, on), Steps("auto"), sizes.new_tokens
    weights, copied = weight_bytes(sizes.model), _rates(sizes, on)[0]
    steps: dict[tuple[int, int], float] = {}  # exact's seconds, by length and batch
    for (n, batches), name in product(sizes.decoding, METHODS):
        case, exact = f"{name} at {n}", cache_bytes(sizes.model, n)
        with out.memory_for(case):
            warm, token, _ = _read(model, min(n, 1024), name, 24)
            _decoded(model, [warm], token, 24, graphs)
            del warm
            free_memory(on)
            row, token, prefill_s = _read(model, n, name, new)
            cost = row.cost()
            assert cost.cache_bytes is not None
            held = {"prefill_s": prefill_s, "compress_s": cost.compress_s}
            out.measured[case] = held | {"cache_bytes": cost.cache_bytes}
            share = cost.compress_s / prefill_s
            if name != "exact":
                figure = f"{case}: compression over prefill"
                out.check(figure, share, most=COMPRESSION, goal=True, clock=True)
            peaks: list[int] = []
            for batch in batches:
                free_memory(on)
                torch.cuda.reset_peak_memory_stats(on)
                rows = [row.clone() for _ in range(batch)]
                step_s = statistics.median(_decoded(model, rows, token, new, graphs))
                del rows
                peaks.append(torch.cuda.max_memory_allocated(on))
                share = (weights + batch * cost.cache_bytes) / step_s / copied
                figures = {"step_s": step_s, "share_of_the_copy_rate": share}
                out.measured[f"{case}, batch {batch}"] = figures | {"peak_bytes": peaks[-1]}
                if name == "exact":
                    steps[n, batch] = step_s
                elif (n, batch) in steps:
                    allowed = ceiling(weights, exact, cost.cache_bytes, batch)
                    figure, speedup = f"{case}, batch {batch}: speed-up", steps[n, batch] / step_s
                    out.check(figure, speedup, most=CEILING * allowed, clock=True)
                    figure = f"{figure}, of {allowed:.2f}"
                    out.check(figure, speedup, least=GOAL * allowed, goal=True, clock=True)
            if name == "exact":
                off = abs(cost.cache_bytes / exact - 1)
                out.check(f"{case}: bytes of the cache, off by", off, most=0)
            if name == "exact" and len(batches) > 1:
                one_more = (peaks[-1] - peaks[0]) / (batches[-1] - batches[0])
                off = abs(one_more / cache_bytes(sizes.model, n + new) - 1)
                out.check(f"{case}: bytes of one more row, off by", off, most=BYTES, clock=True)
        free_memory(on)
    out.check("decode steps that could not be captured", graphs.failed, most=0)


def capacity(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Each method's largest batch that was really allocated and decoded, beside exact's."""
    model, n = _llama(sizes, on), sizes.capacity

    def decodes(name: str, batch: int) -> None:
        """Copies of the first prompt's cache, and the last prompt read beside them."""
        row, token, _ = _read(model, n, name, 8)
        rows = [row, *(row.clone() for _ in range(batch - 2))]
        if batch > 1:
            rows.append(_read(model, n, name, 8, seed=1)[0])
        _decoded(model, rows, token, 3, Steps())

    largest: dict[str, int] = {}
    for name in METHODS:
        largest[name] = largest_batch(partial(decodes, name), on, sizes.most_batch)
        out.measured[f"{name}: largest batch"] = largest[name]
        if name != "exact":
            ratio, figure = largest[name] / largest["exact"], f"{name}: largest batch over exact's"
            out.check(figure, ratio, least=CAPACITY, goal=True, clock=True)


def second(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Methods and captured steps on the last GPU, while the first is the current one."""
    if torch.cuda.device_count() < 2:
        out.left_out["all of it"] = "one GPU"
        return
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    tokens(sizes, last, out)
    model, eager, captured = _llama(sizes, last), Steps("eager"), Steps("auto")
    (one,), _ = _generated(model, sizes.prompt, 24, "snapkv", eager)
    (other,), _ = _generated(model, sizes.prompt, 24, "snapkv", captured)
    unlike = [a != b for a, b in zip(one.tokens, other.tokens, strict=True)]
    out.check("captured steps", len(captured.kept), least=1)
    equal = [*unlike, True].index(True)
    figure = "equal tokens of captured and eager steps, from the first on"
    out.check(figure, equal, least=FIRST_STEPS + 3)


# --- all of them ---------------------------------------------------------------------------------


SECTIONS: tuple[Callable[[Sizes, torch.device, Figures], None], ...] = (
    device,
    tokens,
    kernels,
    throughput,
    decoding,
    capacity,
    second,
)
"""All sections but `tests`, in the order in which they run."""


def main() -> int:
    names = [*(section.__name__ for section in SECTIONS), "tests"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(names), help="sections, with commas")
    folder = ROOT / "runs" / "gpu"
    parser.add_argument("--out", type=Path, default=folder, help=f"a folder (default: {folder})")
    parser.add_argument("--pytest", default=TESTS, help="what the section tests runs")
    parser.add_argument("--small", action="store_true", help="sizes for a pretended GPU")
    arguments = parser.parse_args()
    chosen = [name for name in names if name in arguments.only.split(",")]
    if unknown := set(arguments.only.split(",")) - set(names):
        parser.error(f"--only names {sorted(unknown)}; allowed: {', '.join(names)}")
    if not torch.cuda.is_available():
        print("gpu_check needs a GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    sizes, on = SMALL if arguments.small else Sizes(), torch.device("cuda", 0)
    runs: dict[str, Callable[[Figures], None]] = {"tests": partial(tests, arguments.pytest)}
    runs |= {section.__name__: partial(section, sizes, on) for section in SECTIONS}
    from triton import knobs

    knobs.compilation.listener = note_compiled
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(on).lower()).strip("-")
    path = arguments.out / f"{gpu}-{chosen[0]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"code_revision": provenance.code_revision(), "sections": {}}
    signal.signal(signal.SIGALRM, _stop)
    if sizes.timed:
        signal.setitimer(signal.ITIMER_REAL, max(0.1, BEGAN + LIMIT - time.perf_counter()))
    for name in chosen:
        report["sections"][name] = run_section(runs[name], Figures(sizes.timed))
        path.write_text(json.dumps(report, indent=1) + "\n")
        print_section(name, report["sections"][name])
        free_memory(on)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(path)
    return int(not all(section["passed"] for section in report["sections"].values()))


def _stop(*_: object) -> None:
    """What an alarm at `LIMIT` does: the section that runs ends here, with the figures it has."""
    raise OutOfTime(f"stopped after {LIMIT:g} s")


def run_section(run: Callable[[Figures], None], out: Figures) -> dict[str, Any]:
    """Run one section, if its time is not over; what the report says of it."""
    start, compiled_before = time.perf_counter(), len(COMPILED)
    try:
        if out.timed and start > BEGAN + LIMIT:
            raise OutOfTime(f"not begun: {LIMIT:g} s are over")
        run(out)
    except OutOfTime as reason:
        out.left_out["the rest of it"] = str(reason)
    except Exception as failure:  # noqa: BLE001 - the other sections run all the same
        out.wrong.append(one_line(failure))
    return {
        "passed": not out.wrong,
        "wrong": out.wrong,
        "short": out.short,
        "left_out": out.left_out,
        "seconds": round(time.perf_counter() - start, 1),
        "compiling_s": round(sum(COMPILED[compiled_before:]), 1),
        **out.measured,
    }


def print_section(name: str, section: Mapping[str, Any]) -> None:
    """Print whether a section passed, its seconds, and what is wrong, short of a goal or left out."""
    times = f"{section['seconds']:6.1f} s, {section['compiling_s']:5.1f} s of it compiling"
    print(f"{name:12} {times}  {'ok' if section['passed'] else 'FAILED'}", flush=True)
    lines = list(section["wrong"])
    lines += [f"short of a goal: {line}" for line in section["short"]]
    lines += [f"left out: {name}: {reason}" for name, reason in section["left_out"].items()]
    for line in lines:
        print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
