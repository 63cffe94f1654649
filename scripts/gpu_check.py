"""The first hour on a GPU, in ten minutes: is what kvbench computes, times and counts there right?

    make gpu-check                # or: python scripts/gpu_check.py [--only parity,tokens]

Needs CUDA, torch, triton, transformers, scipy and pydantic; `make gpu-wheels` fetches what a node
without a network lacks. Runs its sections one after the other, writes <out>/<device>.json after each
with every figure beside its limit, begins none after LIMIT seconds, and exits with 1 if any failed;
scripts/README.md says what each figure would falsify. `--small` takes sizes for a pretend GPU, whose
clock means nothing, so that no rate or ratio fails there.
"""

# ruff: noqa: E402 - benchmarks/ is a folder of scripts

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "benchmarks")]

import bench_kernels
import torch
from torch import Tensor

from kvbench.engine.faults import free_memory
from kvbench.engine.generate import Generation, Prompt, run_batch
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.loading import ModelSpec, load_model
from kvbench.engine.stopping import Stopping
from kvbench.errors import UserError, one_line
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kernels.decode_attention import append_entries, entry_table, weighted_decode_attention
from kvbench.kernels.kcentre import greedy_k_centre
from kvbench.kernels.philox import philox
from kvbench.kv import Budget
from kvbench.methods import available_methods, build_method
from kvbench.run import provenance

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 262144, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SMALL_LLAMA = LLAMA_8B | {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LEAST = {
    "decode_attention": 0.4, "attention_mass": 0.15, "balanced_halving": 0.05, "cut": 0.01,
    "kcentre": 0.001,
}  # fmt: skip
"""Floor over measured time that each kernel should reach; expectations, not measurements."""
WALL = 1.05
"""Wall seconds of a generation over those its parts add up to, at most."""
CEILING = 1.05
"""Speed-up over what the bytes read per token allow, at most: more means that a clock is wrong."""
GOAL = 0.8
"""Share of that ceiling that a decode step should reach."""
BYTES = 0.10
"""How far the memory of one more prompt may be from the bytes its cache should have."""
LIMIT = 540.0
"""Seconds after which no other section is begun, and the running tests are stopped."""
TESTS = (
    "tests/kernels/test_kernels.py tests/kernels/test_kernels_cuda.py "
    "tests/kernels/test_kernels_eviction.py tests/engine/test_cuda.py"
)
"""Every kernel at several shapes, eviction included, and decoding steps."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Sizes:
    """What the sections measure."""

    copy: int = 1 << 30
    matmul: int = 8192
    parity: int = 1024  # tokens
    shapes: tuple[tuple[int, int], ...] = ((64, 1), (80, 4), (128, 4), (128, 7), (256, 1))
    """Head dimensions and query heads per KV head."""
    prompt: int = 900
    kernels: tuple[int, int] = (16384, 64)  # tokens, rows
    model: dict[str, Any] = field(default_factory=lambda: LLAMA_8B)
    contexts: tuple[int, ...] = (4096, 16384, 65536)
    longest: int = 130816
    new_tokens: int = 64
    batch: int = 4
    timed: bool = True


SMALL = Sizes(
    1 << 16, 32, 48, ((16, 2), (16, 7)), 60, (64, 2), SMALL_LLAMA, (200,), 400, 4, 1, timed=False
)  # fmt: skip


class Failed(Exception):
    """A section cannot go on."""


@dataclass
class Figures:
    """What a section measured, kept whether or not it is as it should be.

    Attributes:
        found: figures by name; those that were checked with their limit.
        wrong: one line for each figure beyond its limit.
    """

    found: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def most(self, name: str, measured: float, limit: float, expected: float | None = None) -> None:
        """A figure that must not be above `limit`."""
        self._checked(name, measured, limit, expected, measured <= limit, "most")

    def least(
        self, name: str, measured: float, limit: float, expected: float | None = None
    ) -> None:
        """A figure that must not be below `limit`."""
        self._checked(name, measured, limit, expected, measured >= limit, "least")

    def _checked(
        self,
        name: str,
        measured: float,
        limit: float,
        expected: float | None,
        good: bool,
        which: str,
    ) -> None:
        self.found[name] = {"measured": measured, "expected": expected, f"at_{which}": limit}
        if not good:
            self.wrong.append(f"{name}: {measured:.3g}, at {which} {limit:.3g}")


def seconds(run: Callable[[], object], calls: int = 10, rounds: int = 3) -> float:
    """Seconds a call takes on the device, the least of some rounds of so many: between two events
    around replays of a graph of it, so that the time Python takes to launch is not in it."""
    run()
    launch: Callable[[], object] = run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
        launch = graph.replay
    except RuntimeError as reason:  # it waits for the device, or allocates in a way no graph may
        print(f"  timed by its launches, not by a graph: {one_line(reason)}", flush=True)
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            launch()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1000 / calls)
    return min(found)


# --- sections ------------------------------------------------------------------------------------


def device(sizes: Sizes, device: torch.device, out: Figures) -> None:
    """Versions and clocks, and what the device copies and multiplies per second."""
    asked = ["driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit"]
    query = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        told = ""
    source = torch.zeros(sizes.copy, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=torch.bfloat16)
    of = torch.cuda.get_device_properties(device)
    out.found |= {
        "name": of.name,
        "capability": f"{of.major}.{of.minor}",
        "multiprocessors": of.multi_processor_count,
        "memory_bytes": of.total_memory,
        "gpus": torch.cuda.device_count(),
        "nvidia_smi": dict(zip(asked, told.split(", "), strict=False)) if told else None,
        "versions": provenance.versions() | {"cuda": torch.version.cuda},
        "cudnn": torch.backends.cudnn.version(),
        "copy_bytes_per_s": 2 * sizes.copy / seconds(lambda: target.copy_(source)),
        "matmul_flops_per_s": 2 * sizes.matmul**3 / seconds(lambda: a @ a),
    }


def tests(arguments: str, limit: float | None, out: Figures) -> None:
    """The tests of kernels and steps that one GPU can run."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", *arguments.split()]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        raise Failed(f"the tests took more than {limit} s") from late
    last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    passed = re.search(r"(\d+) passed", done.stdout)
    out.found |= {"summary": last, "said": done.stdout[-4000:] if done.returncode else None}
    out.least("tests passed", int(passed[1]) if passed else 0, 1)
    out.most("exit status of pytest", done.returncode, 0)


def _normal(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(device)


def _error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def _parity(
    n: int, dim: int, group: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, float]]:
    """Each kernel's distance from float64 on the same inputs, with `group` query heads per KV head."""
    scale, heads = dim**-0.5, 2 * group
    q, k = _normal(device, dtype, 1, heads, n, dim), _normal(device, dtype, 1, 2, n, dim, seed=1)
    v = _normal(device, dtype, 1, 2, n, dim, seed=2)
    q64, k64, v64 = (x.cpu().double() for x in (q, k, v))

    weights = (q64 @ k64.repeat_interleave(group, 1).mT * scale).masked_fill(
        torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf
    )
    mass = attention_mass(q, k, scaling=scale)
    yield "attention_mass", _error(mass, weights.softmax(-1).sum(2))

    keys, values = (torch.cat([x[0], x[0, :, :1]], 1).contiguous() for x in (k, v))
    log_weights = _normal(device, torch.float32, 2, n + 1, seed=3)
    table = entry_table([keys], [values], [log_weights])
    lengths = torch.tensor([n], dtype=torch.int32, device=device)
    new = _normal(device, dtype, 1, 2, dim, seed=4)
    append_entries(table, lengths, new, new)
    yield "append_entries (wrong entries)", float((keys[:, n] != new[0]).double().mean())
    query = _normal(device, dtype, 1, heads, dim, seed=5)
    out, received = weighted_decode_attention(
        query, table, lengths + 1, scaling=scale, return_mass=True
    )
    logits = query[0].cpu().double().view(2, group, dim) @ keys.cpu().double().mT * scale
    shares = (logits + log_weights.cpu().double()[:, None]).softmax(-1)
    yield "decode_attention", _error(out[0].view(2, group, dim), shares @ values.cpu().double())
    assert received is not None
    yield "decode mass", _error(received[0], shares.mean(1))

    b, gamma, offset = 16, 4.0, 0.025
    index = torch.arange(n // b * b).view(1, 1, -1, b).expand(1, 2, -1, b)
    draws = torch.rand(index.shape, generator=torch.Generator().manual_seed(6))
    signs = balanced_walk(
        k, v, index.to(device), draws.to(device), gamma=gamma, offset=offset
    ).cpu()
    blocks = [x[:, :, : n // b * b].view(1, 2, -1, b, dim) for x in (k64, v64)]
    centred = blocks[0] - blocks[0].mean(-2, keepdim=True)
    gram = torch.exp(centred @ centred.mT * scale) * (blocks[1] @ blocks[1].mT + offset)
    inner = (gram.tril(-1) @ (2.0 * signs.double() - 1.0).unsqueeze(-1)).squeeze(-1)
    margin = 0.5 - gamma * inner - draws
    size = gamma * (gram.tril(-1).abs().sum(-1)) + 1.0
    wrong = ((margin > 0) != signs) & (margin.abs() > 1e-4 * size)
    yield "balanced_walk (wrong signs)", float(wrong[..., 1:].double().mean())

    positive = (_normal(device, torch.float32, 1, 2, n, seed=7) > 0)[..., : n - 1]
    order = torch.arange(n, device=device).expand(1, 2, n).contiguous()
    ones = torch.ones(1, 2, n, device=device)
    found = halve(positive, order, ones)
    expected = halve(positive.cpu(), order.cpu(), ones.cpu(), implementation="torch")
    wrong_cut = [(x.cpu() != y).double().mean() for x, y in zip(found, expected, strict=True)]
    yield "cut (wrong entries)", float(sum(wrong_cut))

    points, count = k[0], min(n // 4, 64)
    chosen = greedy_k_centre(points, count, torch.zeros(2, dtype=torch.int64, device=device)).cpu()
    worst = 0.0
    for head in range(2):
        x = points[head].cpu().double()
        distance = (x - x[chosen[head, 0]]).square().sum(1)
        for step in chosen[head, 1:].tolist():
            worst = max(worst, float(1 - distance[step] / distance.max()))
            distance = distance.minimum((x - x[step]).square().sum(1))
    yield "kcentre (short of the farthest)", worst


def parity(sizes: Sizes, device: torch.device, out: Figures) -> None:
    """Every kernel against float64 at several shapes and in three dtypes, with what is allocated filled
    with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated
    try:
        for (dim, group), (dtype, most) in product(sizes.shapes, TOLERANCE.items()):
            for name, error in _parity(sizes.parity, dim, group, dtype, device):
                kind = str(dtype).removeprefix("torch.")
                out.most(f"{name} {kind} head_dim {dim} group {group}", error, most)
    finally:
        torch.use_deterministic_algorithms(before)


def same_draws(device: torch.device, out: Figures) -> None:
    """Every bit of what methods draw on the device is the CPU's."""
    for dtype in (torch.int64, torch.float64, torch.float32):
        for key in (2**32, 2**62 - 1):
            there = philox(key, 3, 40001, dtype=dtype, device=device).cpu()
            here = philox(key, 3, 40001, dtype=dtype, device=torch.device("cpu"))
            out.most(
                f"draws in {dtype}, key {key}: unlike the CPU's", float((there != here).sum()), 0
            )


def tokens(sizes: Sizes, device: torch.device, out: Figures) -> None:
    """Every method on the shipped model in float32: the CPU's draws, and its tokens."""
    same_draws(device, out)
    methods: dict[str, tuple[Any, Budget]] = {}
    left_out = {}
    for name in available_methods():
        try:
            method = build_method(name)
            methods[name] = (method, Budget(rate=0.25, sink=8, window=16))
        except UserError as reason:
            left_out[name] = one_line(reason)
    spec = ModelSpec(name="recall_mini", path="asset:recall_mini")

    def answers(on: torch.device) -> dict[str, Generation]:
        model = load_model(spec, device=on, dtype=torch.float32)
        made = torch.Generator().manual_seed(1)
        ids = torch.randint(3, model.config.vocab_size, (sizes.prompt,), generator=made).tolist()
        prompt = Prompt(ids, [], methods, Stopping(8 if sizes.timed else 2), "gpu_check")
        return run_batch(model, [prompt], seed=0)[0]

    here, there = answers(torch.device("cpu")), answers(device)
    for name, result in here.items():
        if result.failure is not None:  # a package that is not there
            left_out[name] = one_line(result.failure)
            continue
        other = there[name]
        if other.failure is not None:
            out.wrong.append(f"{name}: {one_line(other.failure)}")
        elif other.tokens != result.tokens:
            out.wrong.append(f"{name}: {other.tokens}, the CPU {result.tokens}")
    out.found |= {"methods": sorted(set(methods) - set(left_out)), "left_out": left_out}


class _Bench(bench_kernels.Bench):
    """Its cases; their inputs from the CPU's generator."""

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        return _normal(self.device, self.dtype, *shape, seed=seed)

    def _copy_rate(self) -> float:
        return 1.0  # the section `device` measures both

    _matmul_rate = _copy_rate


def kernels(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """Each kernel against the least time its bytes and products take."""
    bench, rates = _Bench(on, 10 if sizes.timed else 1), Figures()
    device(sizes, on, rates)
    bench.copy_rate = rates.found["copy_bytes_per_s"]
    bench.matmul_rate = rates.found["matmul_flops_per_s"]
    n, rows = sizes.kernels
    cases = [
        *islice(bench_kernels.halvings(bench, n), None if sizes.timed else 1),
        *bench_kernels.decoding(bench, n // 4, rows),
        *bench_kernels.masses(bench, [(8, n, n)]),
        *bench_kernels.centres(bench, n, n // 16),
    ]
    for case in cases:
        rounds = 3 if sizes.timed else 1
        taken = seconds(partial(case.run, "triton"), bench.repeats, rounds)
        floor = max(case.bytes / bench.copy_rate, case.flops / bench.matmul_rate)
        least = LEAST[case.operation] if sizes.timed else 0.0
        out.found[f"{case.operation} {case.size}: seconds"] = taken
        out.least(f"{case.operation} {case.size}: share of the floor", floor / taken, least)


def _llama(sizes: Sizes, on: torch.device) -> Any:
    spec = ModelSpec(name="llama", path="random", random_weights=True, architecture=sizes.model)
    return load_model(spec, device=on, dtype=torch.bfloat16)


def _generated(
    model: Any, n: int, new: int, name: str, graphs: StepGraphs, batch: int = 1
) -> tuple[list[Generation], float]:
    """What `batch` random prompts of n tokens are answered, and the wall seconds of it all."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, n), generator=made).tolist()
    methods = {name: (build_method(name), Budget(rate=0.25))}
    prompts = [Prompt(row, [], methods, Stopping(new), f"p{i}") for i, row in enumerate(ids)]
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
    """Seconds of exact and snapkv: do the parts add up to the wall, and is no speed-up impossible?"""
    model, graphs = _llama(sizes, on), StepGraphs("auto" if sizes.timed else "eager")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= model.get_input_embeddings().weight.numel() * 2  # a token reads one row of it
    no_limit = float("inf")
    for n in (*sizes.contexts, sizes.longest):
        rows: dict[str, Any] = {}
        for name in ("exact", "snapkv"):
            _generated(model, min(n, 1024), 24 if sizes.timed else 2, name, graphs)
            free_memory(on)
            (result,), wall = _generated(model, n, sizes.new_tokens, name, graphs)
            parts = result.prefill_s + result.compress_s + result.decode_s
            rows[name] = {
                "prefill_s": result.prefill_s, "compress_s": result.compress_s,
                "decode_s": result.decode_s, "cache_bytes": result.cache_bytes_end,
                "compress_over_prefill": result.compress_s / result.prefill_s,
            }  # fmt: skip
            most = WALL if sizes.timed else no_limit
            out.most(f"{name} at {n}: wall over its parts", wall / parts, most)
        exact, snapkv = rows["exact"], rows["snapkv"]
        ceiling = (weights + exact["cache_bytes"]) / (weights + snapkv["cache_bytes"])
        speedup = exact["decode_s"] / snapkv["decode_s"]
        out.found[str(n)] = rows
        most = CEILING * ceiling if sizes.timed else no_limit
        out.most(f"snapkv at {n}: decode speed-up", speedup, most, ceiling)
        least = GOAL * ceiling if sizes.timed else 0.0
        out.least(f"snapkv at {n}: decode speed-up, the goal", speedup, least, ceiling)
    out.most("decode steps that could not be captured", float(bool(graphs.failed)), 0)


def memory(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """What one more prompt takes, beside the bytes its cache should have; then the batch that should
    just fit."""
    model, n, new = _llama(sizes, on), sizes.contexts[-1] if not sizes.timed else 16384, 8
    config = model.config
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    peaks = []
    for batch in (sizes.batch, 2 * sizes.batch):
        free_memory(on)
        torch.cuda.reset_peak_memory_stats(on)
        _generated(model, n, new, "exact", StepGraphs(), batch)
        peaks.append(torch.cuda.max_memory_allocated(on))
    each, predicted = (peaks[1] - peaks[0]) / sizes.batch, (n + new) * entry
    free_memory(on)
    total = torch.cuda.mem_get_info(on)[0] + torch.cuda.memory_reserved(on)
    largest = 2 * sizes.batch + int((total - peaks[1]) // max(1, predicted))
    out.found |= {"bytes_per_prompt": each, "predicted": predicted, "largest_batch": largest}
    if sizes.timed:
        out.most("bytes of one more prompt, off by", abs(each / predicted - 1), BYTES)
        _generated(model, n, 2, "exact", StepGraphs(), int(0.95 * largest))


def second(sizes: Sizes, on: torch.device, out: Figures) -> None:
    """The kernels and the methods on the last GPU, while the first is the current one."""
    if torch.cuda.device_count() < 2:
        out.found["left_out"] = "one GPU"
        return
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    parity(sizes, last, out)
    tokens(sizes, last, out)


# --- all of them ---------------------------------------------------------------------------------


def main() -> int:
    """Exit status: 0 where every section passed."""
    names = ["device", "tests", "parity", "tokens", "kernels", "throughput", "memory", "second"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(names), help="sections, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="a folder")
    parser.add_argument("--pytest", default=TESTS, help="what the section tests runs")
    parser.add_argument("--small", action="store_true", help="sizes for a pretend GPU")
    given = parser.parse_args()
    only = given.only.split(",")
    if set(only) - set(names):
        parser.error(f"--only is {given.only!r}; allowed: {', '.join(names)}")
    if not torch.cuda.is_available():
        print("gpu_check needs a GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    sizes, on = (SMALL if given.small else Sizes()), torch.device("cuda", 0)
    run: dict[str, Callable[[Figures], None]] = {
        "tests": partial(tests, given.pytest, 150.0 if sizes.timed else None),
        **{
            section.__name__: partial(section, sizes, on)
            for section in (device, parity, tokens, kernels, throughput, memory, second)
        },
    }
    began = time.perf_counter()
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(on).lower()).strip("-")
    path = given.out / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"code_revision": provenance.code_revision(), "sections": {}}
    for section in (one for one in names if one in only):
        start, out = time.perf_counter(), Figures()
        try:
            if start - began > LIMIT and sizes.timed:
                raise Failed(f"not begun after {LIMIT:g} s of the others")
            run[section](out)
        except Exception as failure:  # noqa: BLE001 - the other sections are wanted all the same
            out.wrong.append(one_line(failure))
        took = round(time.perf_counter() - start, 1)
        found = {"passed": not out.wrong, "wrong": out.wrong, "seconds": took, **out.found}
        report["sections"][section] = found
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{section:12} {took:6.1f} s  {'FAILED' if out.wrong else 'ok'}", flush=True)
        for line in out.wrong:
            print(f"  {line}", flush=True)
        free_memory(on)
    print(path)
    return int(not all(found["passed"] for found in report["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())
