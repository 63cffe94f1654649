"""The first half hour on a GPU: is what kvbench computes, times and counts there right?

    make gpu-check      # or these three, each of which takes at most ten minutes:
    python scripts/gpu_check.py --only device,parity,tokens,kernels,throughput
    python scripts/gpu_check.py --only decoding,memory,capacity,compiled
    python scripts/gpu_check.py --only second,witness,tests

It needs CUDA, torch, triton, transformers, scipy and pydantic; `make gpu-wheels` fetches what a node
without a network lacks. A call runs its sections one after the other and writes
<--out>/<device>-<first section>.json (runs/gpu) after each, with every figure beside its limit or its
goal. It stops LIMIT seconds after the process has begun. The exit status is 1 if a figure is beyond its
limit, which means that something is wrong. A goal that is missed is printed and fails nothing, and so is
what there was too little time or memory for. scripts/README.md says what each figure would falsify.
`--small` takes sizes for a pretended GPU, whose clock means nothing: no rate or ratio fails there.
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
import importlib.util
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
from itertools import islice, pairwise, product, takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]

import bench_kernels
import gpu_parity
import torch
from _shared import LLAMA_8B, SHIPPED
from bench_engine import Clocked
from gpu_parity import normal
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvbench.engine.faults import free_memory, is_out_of_memory, release_frames
from kvbench.engine.fork import Fork
from kvbench.engine.generate import Generation, Prompt, run_batch
from kvbench.engine.graphs import FIRST_STEPS, StepGraphs
from kvbench.engine.loading import load_model
from kvbench.engine.model_spec import ModelSpec
from kvbench.engine.prefill import prefill
from kvbench.engine.rows import DecodingRow, decode_rows
from kvbench.engine.static_cache import generate_with_static_cache
from kvbench.engine.stopping import Stopping
from kvbench.errors import UserError, one_line
from kvbench.kernels.philox import philox
from kvbench.kv import Budget
from kvbench.methods import available_methods, build_method
from kvbench.run import provenance

SMALL_LLAMA = LLAMA_8B | {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LEAST = {
    "decode_attention": 0.4,
    "attention_mass": 0.15,
    "balanced_halving": 0.05,
    "cut": 0.01,
}
"""The share of a kernel's measured time that its floor should be, at least; expectations, not
measurements."""
WALL_SHARE = 0.10
"""How much longer the wall seconds of a generation may be than the sum of its parts, as a share of that
sum."""
WALL_SECONDS = 0.05
"""The same in seconds, which Python takes between the parts; the larger of the two counts."""
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
CLOSE_BATCH = 0.03
"""How far the largest batch that was allocated may be below one that was not, as a share of it."""
METHODS = ("exact", "snapkv", "h2o", "balancekv", "subgen")
"""The methods whose speed and memory are measured."""
RATE = 0.25
"""The rate at which they are measured."""
BYTES = 0.10
"""How far the memory of one more prompt may be from the bytes that its cache should have, as a share of
these."""
LIMIT = 560.0
"""Seconds after the process has begun at which the section that runs is stopped; no other is begun."""
TESTS = (
    "tests/kernels/test_attention_mass.py tests/kernels/test_balanced_cut.py "
    "tests/kernels/test_balanced_walk.py tests/kernels/test_choice.py "
    "tests/kernels/test_decode_attention.py tests/kernels/test_eviction.py "
    "tests/kernels/test_online_clusters.py "
    "tests/kernels/test_kernels_cuda.py tests/engine/test_cuda.py"
)
"""Every kernel at several shapes, eviction included, and decoding steps."""
WORKERS = 4
"""Processes that run these tests side by side, where pytest-xdist is installed."""
WITNESS_SECONDS = 200.0
"""Seconds that must be left for transformers' own decoding; torch.compile takes most of them."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """The sizes of what the sections measure; `timed` is False where the clock means nothing."""

    copy: int = 1 << 30
    matmul: int = 8192
    parity: int = 1024  # tokens
    shapes: tuple[tuple[int, int], ...] = ((128, 4), (64, 1), (80, 4), (96, 1), (128, 7), (256, 1))
    """Head dimensions and query heads per KV head, those of most models first."""
    prompt: int = 900
    kernels: tuple[int, int] = (16384, 64)  # tokens, rows
    model: dict[str, Any] = field(default_factory=lambda: LLAMA_8B)
    contexts: tuple[int, ...] = (4096, 32768)
    decoding: tuple[tuple[int, int], ...] = ((32768, 1), (32768, 8), (32768, 16), (131072, 1))
    """Tokens and batches; those of one length stand side by side."""
    new_tokens: int = 64
    memory: int = 16384  # tokens
    batch: int = 4
    timed: bool = True


SMALL = Sizes(
    copy=1 << 16,
    matmul=32,
    parity=48,
    shapes=((128, 2), (80, 1), (16, 7)),
    prompt=60,
    kernels=(64, 2),
    model=SMALL_LLAMA,
    contexts=(100,),
    decoding=((100, 1), (100, 2)),
    new_tokens=24,
    memory=100,
    batch=1,
    timed=False,
)


class Failed(Exception):
    """A section cannot go on."""


class OutOfTime(BaseException):
    """The time of this call is over. No `Exception`, which a fork would take for its own failure."""


@dataclass
class Figures:
    """The figures of a section.

    Attributes:
        measured: figures by name; those that were checked with their limit or goal.
        wrong: a line for each figure beyond its limit.
        short: a line for each goal that is missed.
        left_out: by name, the reason why something was not measured: too little time or memory, or a
            package that is not installed.
        until: when the section has to end, by `time.perf_counter`.
    """

    measured: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    until: float = float("inf")

    def goal(
        self,
        name: str,
        measured: float,
        goal: float,
        expected: float | None = None,
        *,
        most: bool = False,
    ) -> None:
        """Note a figure that should not be below `goal`, or with `most` not above it."""
        reached = measured <= goal if most else measured >= goal
        side = "most" if most else "least"
        self.measured[name] = {
            "measured": measured,
            "expected": expected,
            f"goal_at_{side}": goal,
            "reached": reached,
        }
        if not reached:
            self.short.append(f"{name}: {measured:.3g}, goal at {side} {goal:.3g}")

    def has_time_for(self, name: str, seconds: float) -> bool:
        """Whether so many seconds are left; if not, notes that `name` is left out."""
        left = self.until - time.perf_counter()
        if seconds > left:
            self.left_out[name] = f"takes about {seconds:.0f} s, {max(0.0, left):.0f} s are left"
        return seconds <= left

    @contextmanager
    def memory_for(self, name: str) -> Iterator[None]:
        """Within the context, running out of memory is noted, and `name` is left out."""
        try:
            yield
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            self.left_out[name] = one_line(failure)

    def most(self, name: str, measured: float, limit: float, expected: float | None = None) -> None:
        """Note a figure that must not be above `limit`."""
        self._check(name, measured, limit, expected, measured <= limit, "most")

    def least(
        self, name: str, measured: float, limit: float, expected: float | None = None
    ) -> None:
        """Note a figure that must not be below `limit`."""
        self._check(name, measured, limit, expected, measured >= limit, "least")

    def _check(
        self,
        name: str,
        measured: float,
        limit: float,
        expected: float | None,
        within: bool,
        side: str,
    ) -> None:
        """Note a figure and its limit, and a line unless the figure is within it."""
        self.measured[name] = {"measured": measured, "expected": expected, f"at_{side}": limit}
        if not within:
            self.wrong.append(f"{name}: {measured:.3g}, at {side} {limit:.3g}")


@dataclass
class Compiled:
    """The Triton kernels that were compiled, or read from the disk, by this process.

    Attributes:
        names: the kernels' names, each once for every kind of arguments that it is compiled for.
        seconds: how long all of it took.
    """

    names: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def listen(self) -> bool:
        """Have Triton call this object for every kernel; False where this Triton cannot."""
        try:
            from triton import knobs

            knobs.compilation.listener = self
        except (ImportError, AttributeError):
            return False
        return True

    def __call__(self, *, src: Any, times: Any, **_: Any) -> None:
        """Note one kernel; Triton calls this after each."""
        self.names.append(str(getattr(src, "name", src)))
        self.seconds += times.total / 1e6


COMPILED = Compiled()


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
    """`batch` prompts of n random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, n), generator=generator).tolist()


def seconds(run: Callable[[], object], calls: int = 10, rounds: int = 3) -> float:
    """Seconds that `run` takes on the device: the least, over the rounds, of the mean of `calls` calls.

    Events before and after replays of a captured graph of it are the clock, so that the time that Python
    takes to launch kernels does not count.
    """
    run()
    launch: Callable[[], object] = run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
        launch = graph.replay
    except RuntimeError as reason:  # it waits for the device, or allocates as no graph may
        print(f"  timed by its launches, not by a graph: {one_line(reason)}", flush=True)
    seconds_a_call = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            launch()
        end.record()
        torch.cuda.synchronize()
        seconds_a_call.append(start.elapsed_time(end) / 1000 / calls)
    return min(seconds_a_call)


# --- sections ------------------------------------------------------------------------------------


def device(sizes: Sizes, device: torch.device, out: Figures) -> None:
    """Versions and clocks, and what the device copies and multiplies per second."""
    fields = ["driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit"]
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        answer = ""
    copied, multiplied = _rates(sizes, device)
    properties = torch.cuda.get_device_properties(device)
    out.measured |= {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "gpus": torch.cuda.device_count(),
        "nvidia_smi": dict(zip(fields, answer.split(", "), strict=False)) if answer else None,
        "versions": provenance.versions() | {"cuda": torch.version.cuda},
        "cudnn": torch.backends.cudnn.version(),
        "copy_bytes_per_s": copied,
        "matmul_flops_per_s": multiplied,
    }


@cache
def _rates(sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Bytes a second that the device reads and writes when it copies, and floating-point operations a
    second of its matrix products."""
    source = torch.zeros(sizes.copy, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=torch.bfloat16)
    copying, multiplying = seconds(lambda: target.copy_(source)), seconds(lambda: a @ a)
    return 2 * sizes.copy / copying, 2 * sizes.matmul**3 / multiplying


def tests(arguments: str, out: Figures) -> None:
    """Run the tests of kernels and steps that one GPU can run."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", *arguments.split()]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    left = None if out.until == float("inf") else max(1.0, out.until - time.perf_counter())
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        out.left_out["tests"] = f"they take more than the {left:.0f} s that are left"
        return
    summary = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    passed = re.search(r"(\d+) passed", done.stdout)
    out.measured |= {"summary": summary, "said": done.stdout[-4000:] if done.returncode else None}
    out.least("tests passed", int(passed[1]) if passed else 0, 1)
    out.most("exit status of pytest", done.returncode, 0)


def parity(sizes: Sizes, device: torch.device, out: Figures) -> None:
    """Every kernel against float64 at several shapes and in three dtypes, with what is allocated filled
    with NaN. One that raises leaves the others to be checked."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated
    try:
        for (dim, group), dtype in product(sizes.shapes, gpu_parity.TOLERANCE):
            inputs = gpu_parity.Inputs(sizes.parity, dim, group, dtype, device)
            for check in gpu_parity.CHECKS:
                try:
                    for name, distance, limit in check(inputs):
                        out.most(f"{name} {inputs}", distance, limit)
                except Exception as failure:  # noqa: BLE001 - the other kernels are checked, too
                    out.wrong.append(f"{check.__name__} {inputs}: {one_line(failure)}")
    finally:
        torch.use_deterministic_algorithms(before)


def same_draws(device: torch.device, out: Figures) -> None:
    """Every bit of what methods draw on the device is the same as on the CPU."""
    for dtype in (torch.int64, torch.float64, torch.float32):
        for key in (2**32, 2**62 - 1):
            on_device = philox(key, 3, 40001, dtype=dtype, device=device).cpu()
            on_cpu = philox(key, 3, 40001, dtype=dtype, device=torch.device("cpu"))
            different = float((on_device != on_cpu).sum())
            out.most(f"draws in {dtype}, key {key}: unlike the CPU's", different, 0)


def tokens(sizes: Sizes, device: torch.device, out: Figures) -> None:
    """Every method on the shipped model in float32 draws the same numbers, and answers the same tokens,
    as on the CPU."""
    same_draws(device, out)
    methods: dict[str, tuple[Any, Budget]] = {}
    for name in available_methods():
        try:
            method = build_method(name)
            if method.decoded_by == "kvbench":
                methods[name] = (method, Budget(rate=0.25, sink=8, window=16))
        except UserError as reason:
            out.left_out[name] = one_line(reason)

    def answers(on: torch.device) -> dict[str, Generation]:
        model = load_model(SHIPPED, device=on, dtype=torch.float32)
        (ids,) = random_ids(model, sizes.prompt, seed=1)
        prompt = Prompt(ids, [], methods, Stopping(8 if sizes.timed else 2), "gpu_check")
        return run_batch(model, [prompt], seed=0)[0]

    answers_on_cpu = answers(torch.device("cpu"))
    answers_on_device = answers(device)
    for name, result in answers_on_cpu.items():
        if isinstance(result.failure, UserError):
            # A package that is not there, or what the method cannot do with this prompt.
            out.left_out[name] = one_line(result.failure)
            continue
        if result.failure is not None:
            out.wrong.append(f"{name} on the CPU: {one_line(result.failure)}")
            continue
        other = answers_on_device[name]
        if other.failure is not None:
            out.wrong.append(f"{name}: {one_line(other.failure)}")
        elif other.tokens != result.tokens:
            out.wrong.append(f"{name}: {other.tokens}, the CPU {result.tokens}")
    out.measured["methods"] = sorted(set(methods) - set(out.left_out))


class _Bench(bench_kernels.Bench):
    """The cases of bench_kernels.py, with inputs that the CPU's generator draws."""

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """See `bench_kernels.Bench.normal`."""
        return normal(self.device, self.dtype, *shape, seed=seed)

    def _copy_rate(self) -> float:
        return 1.0  # the section `device` measures both

    _matmul_rate = _copy_rate


def kernels(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Each kernel against the least time its bytes and products take."""
    bench = _Bench(on, 10 if sizes.timed else 1)
    bench.copy_rate, bench.matmul_rate = _rates(sizes, on)
    n, rows = sizes.kernels
    cases = [
        *islice(bench_kernels.halvings(bench, n), None if sizes.timed else 1),
        *bench_kernels.decoding(bench, n // 4, rows),
        *bench_kernels.masses(bench, [(8, n, n)]),
    ]
    for case in cases:
        rounds = 3 if sizes.timed else 1
        measured = seconds(partial(case.run, "triton"), bench.repeats, rounds)
        floor = max(case.bytes / bench.copy_rate, case.flops / bench.matmul_rate)
        least = LEAST[case.operation] if sizes.timed else 0.0
        out.measured[f"{case.operation} {case.size}: seconds"] = measured
        out.least(f"{case.operation} {case.size}: share of the floor", floor / measured, least)
        if case.operation == "decode_attention":
            goal = GOAL if sizes.timed else 0.0
            share = case.bytes / bench.copy_rate / measured
            out.goal(f"{case.operation} {case.size}: share of the copy rate", share, goal)


@cache
def _llama(sizes: Sizes, on: torch.device) -> Any:
    """The model of the sections that time: random weights of `sizes.model`'s shape in bfloat16."""
    spec = ModelSpec(name="llama", path="random", random_weights=True, architecture=sizes.model)
    return load_model(spec, device=on, dtype=torch.bfloat16)


def _generated(
    model: Any, n: int, new: int, name: str, graphs: StepGraphs, batch: int = 1
) -> tuple[list[Generation], float]:
    """The answers of a method to `batch` random prompts of n tokens, `new` tokens each, and the wall
    seconds of prefill, compression and decoding."""
    methods = {name: (build_method(name), Budget(rate=RATE))}
    prompts = [
        Prompt(ids, [], methods, Stopping(new), f"p{i}")
        for i, ids in enumerate(random_ids(model, n, batch))
    ]
    torch.cuda.synchronize()
    start = time.perf_counter()
    results = [answer[name] for answer in run_batch(model, prompts, seed=0, graphs=graphs)]
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    for result in results:
        if result.failure is not None:
            raise Failed(f"{name} at {n} tokens: {one_line(result.failure)}")
    return results, wall


def throughput(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Seconds of exact and snapkv: do the parts add up to the wall seconds, and was nothing compiled
    meanwhile?"""
    model, graphs = _llama(sizes, on), StepGraphs("auto")
    for n, name in product(sizes.contexts, ("exact", "snapkv")):
        _generated(model, min(n, 1024), 24, name, graphs)
        free_memory(on)
        before = len(COMPILED.names)
        (result,), wall = _generated(model, n, sizes.new_tokens, name, graphs)
        compiled = COMPILED.names[before:]
        parts = {part: getattr(result, part) for part in ("prefill_s", "compress_s", "decode_s")}
        out.measured[f"{name} at {n}"] = parts | {"compiled": compiled}
        parts_together = sum(parts.values())
        most = max(WALL_SHARE * parts_together, WALL_SECONDS) if sizes.timed else float("inf")
        out.most(f"{name} at {n}: wall seconds beyond its parts", wall - parts_together, most)
        out.most(f"{name} at {n}: kernels compiled inside the clock", float(len(compiled)), 0)
    out.most("decode steps that could not be captured", float(bool(graphs.failed)), 0)


def _read(model: Any, n: int, name: str, room: int, seed: int = 0) -> tuple[Fork, int, float]:
    """A method's cache of one random prompt of n tokens, the first new token, the prefill's seconds."""
    (ids,) = random_ids(model, n, seed=seed)
    fork = Fork(name, build_method(name), Budget(rate=RATE), 0, f"p{seed}", room=room)
    start = prefill(model, ids, [fork])
    if fork.failure is not None:
        raise fork.failure
    return fork, int(start.logits.argmax()), start.prefill_s


def _reserved(fork: Fork) -> int:
    """Bytes that a fork's caches have reserved, room for new tokens included."""
    return sum(layer.reserved_bytes() for layer in fork.layers.values())


@torch.inference_mode()
def _decoded(
    model: Any, forks: list[Fork], token: int, new: int, graphs: StepGraphs
) -> list[float]:
    """The seconds of each decode step that the forks take together, of so many new tokens."""
    clocked = Clocked(new)
    rows = [DecodingRow(fork, Stopping(new) if i else clocked) for i, fork in enumerate(forks)]
    for row in rows:
        row.take(token, True)
    decode_rows(model, rows, graphs)
    for row in rows:
        if row.fork.failure is not None:
            raise row.fork.failure
    return [after - before for before, after in pairwise(clocked.times)]


def _backend(sizes: Sizes, n: int, on: torch.device) -> str:
    """Which of torch's attention kernels a prefill of n tokens runs."""
    heads, kv_heads = sizes.model["num_attention_heads"], sizes.model["num_key_value_heads"]
    head_dim = sizes.model["hidden_size"] // heads
    query = torch.empty(1, heads, n, head_dim, dtype=torch.bfloat16, device=on)
    key = torch.empty(1, kv_heads, n, head_dim, dtype=torch.bfloat16, device=on)
    choice = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True)
    return SDPBackend(choice).name


def decoding(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Each method's compression beside its prefill, its decode steps at several batches beside what
    their bytes allow, and its peak of memory."""
    model, graphs = _llama(sizes, on), StepGraphs("auto")
    steps: dict[tuple[int, int], float] = {}
    seconds_at: dict[int, float] = {}  # by length: what the method before took
    for n, name in product(dict.fromkeys(n for n, _ in sizes.decoding), METHODS):
        case = f"{name} at {n}"
        begun = time.perf_counter()
        if out.has_time_for(case, seconds_at.get(n, 0.0)):
            free_memory(on)
            with out.memory_for(case):
                _steps_of(sizes, model, n, name, graphs, steps, out)
            seconds_at[n] = time.perf_counter() - begun
    out.most("decode steps that could not be captured", float(bool(graphs.failed)), 0)


def _steps_of(
    sizes: Sizes,
    model: Any,
    n: int,
    name: str,
    graphs: StepGraphs,
    steps: dict[tuple[int, int], float],
    out: Figures,
) -> None:
    """Measure one method at one length, at every batch: copies of one cache that decode together.

    Args:
        steps: the seconds of a decode step of `exact`, by length and batch, which the call with the
            method exact fills.
    """
    method_and_length = f"{name} at {n}"
    on = model.device
    no_limit = float("inf")
    warm, token, _ = _read(model, min(n, 1024), name, 24)
    _decoded(model, [warm], token, 24, graphs)
    del warm
    free_memory(on)
    torch.cuda.reset_peak_memory_stats(on)
    before = len(COMPILED.names)
    fork, token, prefill_s = _read(model, n, name, sizes.new_tokens)
    cost, compiled = fork.cost(), COMPILED.names[before:]
    assert cost.cache_bytes is not None
    out.measured[method_and_length] = {
        "attention": _backend(sizes, n, on),
        "prefill_s": prefill_s,
        "compress_s": cost.compress_s,
        "compiled": compiled,
        "cache_bytes": cost.cache_bytes,
        "prefill_peak_bytes": torch.cuda.max_memory_allocated(on),
    }
    weights, exact = weight_bytes(sizes.model), cache_bytes(sizes.model, n)
    if name == "exact":
        out.most(
            f"{method_and_length}: bytes of the cache, off by", abs(cost.cache_bytes / exact - 1), 0
        )
    else:
        most = COMPRESSION if sizes.timed else no_limit
        share = cost.compress_s / prefill_s
        out.goal(f"{method_and_length}: compression over prefill", share, most, most=True)
    for batch in (b for tokens, b in sizes.decoding if tokens == n):
        case = f"{method_and_length}, batch {batch}"
        free_memory(on)
        torch.cuda.reset_peak_memory_stats(on)
        with out.memory_for(case):
            forks = [fork.clone() for _ in range(batch)]
            step_s = statistics.median(_decoded(model, forks, token, sizes.new_tokens, graphs))
            bytes_read = weights + batch * cost.cache_bytes
            out.measured[case] = {
                "step_s": step_s,
                "bytes_read": bytes_read,
                "share_of_the_copy_rate": bytes_read / step_s / _rates(sizes, on)[0],
                "peak_bytes": torch.cuda.max_memory_allocated(on),
            }
        forks = []
        if name == "exact" and case in out.measured:
            steps[n, batch] = step_s
        elif (n, batch) in steps and case in out.measured:
            allowed = ceiling(weights, exact, cost.cache_bytes, batch)
            speedup = steps[n, batch] / step_s
            most, least = (CEILING * allowed, GOAL * allowed) if sizes.timed else (no_limit, 0.0)
            out.most(f"{case}: decode speed-up", speedup, most, allowed)
            out.goal(f"{case}: decode speed-up, the goal", speedup, least, allowed)


def memory(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """What one more prompt takes, beside the bytes its cache should have."""
    model, new = _llama(sizes, on), 8
    peaks = []
    for batch in (sizes.batch, 2 * sizes.batch):
        free_memory(on)
        torch.cuda.reset_peak_memory_stats(on)
        _generated(model, sizes.memory, new, "exact", StepGraphs(), batch)
        peaks.append(torch.cuda.max_memory_allocated(on))
    bytes_per_prompt = (peaks[1] - peaks[0]) / sizes.batch
    predicted = cache_bytes(sizes.model, sizes.memory + new)
    out.measured |= {"bytes_per_prompt": bytes_per_prompt, "predicted": predicted}
    most = BYTES if sizes.timed else float("inf")
    out.most("bytes of one more prompt, off by", abs(bytes_per_prompt / predicted - 1), most)


def capacity(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Each method's largest batch that was really allocated and decoded, beside exact's. The search
    begins at what bytes allow; a batch that runs out of memory is halved."""
    model, n = _llama(sizes, on), sizes.memory
    largest: dict[str, int] = {}
    seconds_of_last = 0.0
    for name in METHODS:
        if not out.has_time_for(name, seconds_of_last):
            continue
        begun = time.perf_counter()
        free_memory(on)
        torch.cuda.reset_peak_memory_stats(on)
        fork, _, _ = _read(model, n, name, 8)
        total = torch.cuda.mem_get_info(on)[0] + torch.cuda.memory_reserved(on)
        left_for_others = total - torch.cuda.max_memory_allocated(on)
        cache = _reserved(fork)
        predicted = 1 + max(0, left_for_others) // cache
        del fork
        largest[name] = largest_that_fits(
            partial(_decodes, model, n, name), predicted if sizes.timed else 3
        )
        out.measured[f"{name}: bytes of a cache"] = cache
        out.measured[f"{name}: largest batch by bytes"] = predicted
        out.measured[f"{name}: largest batch"] = largest[name]
        if "exact" in largest and name != "exact":
            ratio = largest[name] / largest["exact"]
            goal = CAPACITY if sizes.timed else 0.0
            out.goal(f"{name}: largest batch over exact's", ratio, goal)
        seconds_of_last = time.perf_counter() - begun


def _decodes(model: Any, n: int, name: str, batch: int) -> bool:
    """Whether a batch of so many caches of n tokens decodes without running out of memory: copies of the
    first prompt's, and the last prompt read beside them."""
    try:
        fork, token, _ = _read(model, n, name, 8)
        forks = [fork, *(fork.clone() for _ in range(batch - 2))]
        if batch > 1:
            forks.append(_read(model, n, name, 8, seed=1)[0])
        _decoded(model, forks, token, 3, StepGraphs())
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
        release_frames(failure)
        return False
    finally:
        free_memory(model.device)
    return True


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch, of at most `most`, for which `fits` is true, to within `CLOSE_BATCH`.

    `most` itself is tried first; what does not fit is halved, and what lies between is then searched.

    Raises:
        Failed: not even one prompt fits.
    """
    too_many, size = most + 1, most
    while not fits(size):
        too_many, size = size, size // 2
        if size == 0:
            raise Failed("not even a batch of one prompt fits")
    while too_many - size > max(1, CLOSE_BATCH * size):
        middle = (size + too_many) // 2
        if fits(middle):
            size = middle
        else:
            too_many = middle
    return size


def _equal_tokens(first: Generation, second: Generation) -> int:
    """How many tokens of two answers of one length are equal, up to the first that differs."""
    pairs = zip(first.tokens, second.tokens, strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def compiled(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Steps of a model that torch has compiled (decode=compiled) beside those of the model as it is."""
    model, n = _llama(sizes, on), sizes.contexts[0]
    answers: dict[str, Generation] = {}
    for decode in ("auto", "compiled"):
        graphs = StepGraphs(decode)
        for _ in range(2):  # the first time compiles and captures
            (answers[decode],), _ = _generated(model, n, sizes.new_tokens, "snapkv", graphs)
        step_s = answers[decode].decode_s / answers[decode].new_tokens
        out.measured[f"{decode} at {n}"] = {"step_s": step_s, "capture_failed": graphs.failed}
    equal = _equal_tokens(answers["auto"], answers["compiled"])
    out.measured["equal tokens from the first on"] = equal
    share = answers["compiled"].decode_s / answers["auto"].decode_s
    out.goal("compiled steps over others", share, 1 if sizes.timed else float("inf"), most=True)


def second(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Kernels, methods and captured steps on the last GPU, while the first is the current one."""
    if torch.cuda.device_count() < 2:
        out.left_out["all of it"] = "one GPU"
        return
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    parity(sizes, last, out)
    tokens(sizes, last, out)
    model, eager, captured = _llama(sizes, last), StepGraphs("eager"), StepGraphs("auto")
    (eager_answer,), _ = _generated(model, sizes.prompt, 24, "snapkv", eager)
    (answer,), _ = _generated(model, sizes.prompt, 24, "snapkv", captured)
    equal = _equal_tokens(answer, eager_answer)
    out.least("captured steps", len(captured.kept), 1)
    out.least("equal tokens of captured and eager steps, from the first on", equal, FIRST_STEPS + 3)


def witness(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Exact decoding by transformers' own static cache and torch.compile beside kvbench's `exact`: is
    the yardstick of every table a fast one?"""
    model, n, new = _llama(sizes, on), sizes.contexts[0], sizes.new_tokens
    if not out.has_time_for("all of it", WITNESS_SECONDS if sizes.timed else 0.0):
        return
    graphs = StepGraphs("auto")
    for _ in range(2):  # the first time captures
        (exact,), _ = _generated(model, n, new, "exact", graphs)
    graphs.kept.clear()
    ids = random_ids(model, n)
    try:
        (theirs,) = generate_with_static_cache(model, ids, new, attention="sdpa", compiled=True)
    except Exception as failure:  # noqa: BLE001 - another library's failure is none of kvbench's
        out.left_out["all of it"] = one_line(failure)
        return
    for name, result in {"exact": exact, "transformers": theirs}.items():
        out.measured[f"{name} at {n}"] = {
            "prefill_s": result.prefill_s,
            "decode_s": result.decode_s,
        }
    out.measured["equal tokens from the first on"] = _equal_tokens(theirs, exact)
    ratio = theirs.decode_s / exact.decode_s
    least = 1.0 if sizes.timed else 0.0
    out.goal(f"exact at {n}: decode speed over transformers' own", ratio, least)


# --- all of them ---------------------------------------------------------------------------------


SECTIONS: tuple[Callable[[Sizes, torch.device, Figures], None], ...] = (
    device,
    parity,
    tokens,
    kernels,
    throughput,
    decoding,
    memory,
    capacity,
    second,
    compiled,
    witness,
)
"""All sections but `tests`, in the order in which they run."""


def main() -> int:
    """Run the sections; the exit status is 0 where all of them passed, 2 without a GPU."""
    names = [*(section.__name__ for section in SECTIONS), "tests"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(names), help="sections, with commas")
    folder = ROOT / "runs" / "gpu"
    parser.add_argument("--out", type=Path, default=folder, help=f"a folder (default: {folder})")
    parser.add_argument("--pytest", default=TESTS, help="what the section tests runs")
    parser.add_argument("--small", action="store_true", help="sizes for a pretended GPU")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if not set(only) <= set(names):
        parser.error(f"--only is {arguments.only!r}; allowed: {', '.join(names)}")
    if not torch.cuda.is_available():
        print("gpu_check needs a GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    sizes = SMALL if arguments.small else Sizes()
    on = torch.device("cuda", 0)
    runs: dict[str, Callable[[Figures], None]] = {"tests": partial(tests, arguments.pytest)}
    runs |= {section.__name__: partial(section, sizes, on) for section in SECTIONS}
    chosen = [name for name in names if name in only]
    path = arguments.out / f"{bench_kernels.plain_name(on)}-{chosen[0]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"code_revision": provenance.code_revision(), "sections": {}}
    if not COMPILED.listen():
        report["compiling"] = "not known: triton.knobs.compilation.listener is not there"
    end = BEGAN + LIMIT if sizes.timed else float("inf")
    if sizes.timed:
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, max(0.1, end - time.perf_counter()))
    time_is_over = False
    for name in chosen:
        run = _not_begun if time_is_over else runs[name]
        report["sections"][name], time_is_over = run_section(run, end)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print_section(name, report["sections"][name])
        free_memory(on)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(path)
    return int(not all(section["passed"] for section in report["sections"].values()))


def run_section(run: Callable[[Figures], None], end: float) -> tuple[dict[str, Any], bool]:
    """Run one section until `end` at most (by `time.perf_counter`); what the report says of it, and
    whether the time is over."""
    start = time.perf_counter()
    compiling_before = COMPILED.seconds
    time_is_over = False
    out = Figures(until=end)
    try:
        run(out)
    except OutOfTime as reason:
        time_is_over = True
        out.left_out["the rest of it"] = str(reason)
    except Exception as failure:  # noqa: BLE001 - the other sections run all the same
        out.wrong.append(one_line(failure))
    report = {
        "passed": not out.wrong,
        "wrong": out.wrong,
        "short": out.short,
        "left_out": out.left_out,
        "seconds": round(time.perf_counter() - start, 1),
        "compiling_s": round(COMPILED.seconds - compiling_before, 1),
        **out.measured,
    }
    return report, time_is_over


def _not_begun(out: Figures) -> None:
    """What runs in place of a section once the time is over."""
    raise OutOfTime(f"not begun: {LIMIT:g} s are over")


def print_section(name: str, section: Mapping[str, Any]) -> None:
    """Print whether a section passed, its seconds, and what is wrong, short of a goal or left out."""
    times = f"{section['seconds']:6.1f} s, {section['compiling_s']:5.1f} s of it compiling"
    print(f"{name:12} {times}  {'ok' if section['passed'] else 'FAILED'}", flush=True)
    lines = list(section["wrong"])
    lines += [f"short of a goal: {line}" for line in section["short"]]
    lines += [f"left out: {name}: {reason}" for name, reason in section["left_out"].items()]
    for line in lines:
        print(f"  {line}", flush=True)


def _stop(*_: object) -> None:
    """What an alarm at `LIMIT` does: the section that runs ends here, with the figures it has."""
    raise OutOfTime(f"stopped after {LIMIT:g} s")


if __name__ == "__main__":
    sys.exit(main())
