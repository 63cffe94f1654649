"""The first hour on a GPU, in ten minutes: is what kvbench computes, times and counts there right?

    make gpu-check                # or: python scripts/gpu_check.py [--only parity,tokens]

Runs its sections one after the other, writes results/gpu/<device>.json after each, and exits with 1 if
any failed; scripts/README.md says what each figure would falsify. Needs CUDA. `--small` takes sizes for
a pretend GPU, whose clock means nothing, so that no rate or ratio fails there.
"""

# ruff: noqa: E402 - benchmarks/ is a folder of scripts

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "benchmarks")]

import bench_kernels
import torch
import transformers
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
BYTES = 0.10
"""How far the memory of one more prompt may be from the bytes its cache should have."""
LIMIT = 570.0
"""Seconds after which no other section is begun."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Sizes:
    """What the sections measure."""

    copy: int = 1 << 30
    matmul: int = 8192
    parity: tuple[int, int] = (2048, 128)  # tokens, head_dim
    prompt: int = 900
    kernels: tuple[int, int] = (16384, 64)  # tokens, rows
    model: dict[str, Any] = field(default_factory=lambda: LLAMA_8B)
    contexts: tuple[int, ...] = (4096, 16384, 65536)
    longest: int = 130816
    new_tokens: int = 64
    batch: int = 4
    timed: bool = True


SMALL = Sizes(1 << 16, 32, (48, 16), 60, (64, 2), SMALL_LLAMA, (200,), 400, 4, 1, timed=False)


class Failed(AssertionError):
    """A section's figure is not what it should be."""


def check(good: bool, message: str) -> None:
    """Raises:
    Failed: not `good`.
    """
    if not good:
        raise Failed(message)


def seconds(run: Callable[[], object], calls: int = 10, rounds: int = 3) -> float:
    """Seconds a call takes, the least of some rounds of so many."""
    run()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / calls)
    return min(found)


# --- sections ------------------------------------------------------------------------------------


def device(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Versions, and what the device copies and multiplies per second."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        driver = ""
    source = torch.zeros(sizes.copy, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=torch.bfloat16)
    of = torch.cuda.get_device_properties(device)
    return {
        "name": of.name,
        "capability": f"{of.major}.{of.minor}",
        "multiprocessors": of.multi_processor_count,
        "memory_bytes": of.total_memory,
        "gpus": torch.cuda.device_count(),
        "driver": driver or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "copy_bytes_per_s": 2 * sizes.copy / seconds(lambda: target.copy_(source)),
        "matmul_flops_per_s": 2 * sizes.matmul**3 / seconds(lambda: a @ a),
    }


def tests(arguments: str, limit: float | None) -> dict[str, Any]:
    """The tests marked `cuda`."""
    command = [sys.executable, "-m", "pytest", *arguments.split()]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        raise Failed(f"the tests took more than {limit} s") from late
    last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    check(done.returncode == 0, f"pytest: {last}\n{done.stdout[-2000:]}")
    passed = re.search(r"(\d+) passed", done.stdout)
    check(passed is not None, f"pytest passed no test: {last}")
    return {"summary": last}


def _normal(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(device)


def _error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def _parity(
    n: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, float]]:
    """Each kernel's distance from float64 on the same inputs."""
    scale = dim**-0.5
    q, k = _normal(device, dtype, 1, 4, n, dim), _normal(device, dtype, 1, 2, n, dim, seed=1)
    v = _normal(device, dtype, 1, 2, n, dim, seed=2)
    q64, k64, v64 = (x.cpu().double() for x in (q, k, v))

    weights = (q64 @ k64.repeat_interleave(2, 1).mT * scale).masked_fill(
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
    check(bool((keys[:, n] == new[0]).all()), "append_entries wrote something else")
    query = _normal(device, dtype, 1, 4, dim, seed=5)
    out, received = weighted_decode_attention(
        query, table, lengths + 1, scaling=scale, return_mass=True
    )
    logits = query[0].cpu().double().view(2, 2, dim) @ keys.cpu().double().mT * scale
    shares = (logits + log_weights.cpu().double()[:, None]).softmax(-1)
    yield "decode_attention", _error(out[0].view(2, 2, dim), shares @ values.cpu().double())
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


def parity(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Every kernel against float64, in three dtypes, with what is allocated filled with NaN."""
    found: dict[str, Any] = {}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated
    try:
        for dtype, most in TOLERANCE.items():
            for name, error in _parity(*sizes.parity, dtype, device):
                found[f"{name} {str(dtype).removeprefix('torch.')}"] = error
                check(error <= most, f"{name} in {dtype}: {error:.2g} off, at most {most:g}")
    finally:
        torch.use_deterministic_algorithms(before)
    return found


def same_draws(device: torch.device) -> None:
    """Every bit of what methods draw on the device is the CPU's."""
    for dtype in (torch.int64, torch.float64, torch.float32):
        for key in (2**32, 2**62 - 1):
            there = philox(key, 3, 40001, dtype=dtype, device=device).cpu()
            here = philox(key, 3, 40001, dtype=dtype, device=torch.device("cpu"))
            check(torch.equal(there, here), f"draws in {dtype} are not the CPU's")


def tokens(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Every method on the shipped model in float32: the CPU's draws, and its tokens."""
    same_draws(device)
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
        check(other.failure is None, f"{name}: {other.failure}")
        check(other.tokens == result.tokens, f"{name}: {other.tokens}, the CPU {result.tokens}")
    return {"methods": sorted(set(methods) - set(left_out)), "left_out": left_out}


class _Bench(bench_kernels.Bench):
    """Its cases; their inputs from the CPU's generator."""

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        return _normal(self.device, self.dtype, *shape, seed=seed)

    def _copy_rate(self) -> float:
        return 1.0  # the section `device` measures both

    _matmul_rate = _copy_rate


def kernels(sizes: Sizes, on: torch.device, rates: dict[str, Any]) -> dict[str, Any]:
    """Each kernel against the least time its bytes and products take."""
    bench = _Bench(on, 10 if sizes.timed else 1)
    bench.copy_rate = rates["copy_bytes_per_s"]
    bench.matmul_rate = rates["matmul_flops_per_s"]
    n, rows = sizes.kernels
    cases = [
        *islice(bench_kernels.halvings(bench, n), None if sizes.timed else 1),
        *bench_kernels.decoding(bench, n // 4, rows),
        *bench_kernels.masses(bench, [(8, n, n)]),
        *bench_kernels.centres(bench, n, n // 16),
    ]
    found: dict[str, Any] = {}
    for case in cases:
        rounds = 3 if sizes.timed else 1
        taken = seconds(partial(case.run, "triton"), bench.repeats, rounds)
        floor = max(case.bytes / bench.copy_rate, case.flops / bench.matmul_rate)
        found[f"{case.operation} {case.size}"] = {"seconds": taken, "floor_over_it": floor / taken}
        least = LEAST[case.operation] if sizes.timed else 0.0
        check(floor / taken >= least, f"{case.operation} {case.size}: {floor / taken:.3f} of floor")
    return found


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
        check(result.failure is None, f"{name} at {n} tokens: {result.failure}")
    return results, wall


def throughput(sizes: Sizes, on: torch.device) -> dict[str, Any]:
    """Seconds of exact and snapkv: do the parts add up to the wall, and is no speed-up impossible?"""
    model, graphs = _llama(sizes, on), StepGraphs("auto" if sizes.timed else "eager")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= model.get_input_embeddings().weight.numel() * 2  # a token reads one row of it
    found: dict[str, Any] = {}
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
                "wall_over_latency": wall / parts,
            }  # fmt: skip
            most = WALL if sizes.timed else float("inf")
            check(wall / parts <= most, f"{name} at {n}: wall is {wall / parts:.2f} of its parts")
        exact, snapkv = rows["exact"], rows["snapkv"]
        ceiling = (weights + exact["cache_bytes"]) / (weights + snapkv["cache_bytes"])
        speedup = exact["decode_s"] / snapkv["decode_s"]
        found[str(n)] = rows | {"decode_speedup": speedup, "ceiling": ceiling}
        most = CEILING * ceiling if sizes.timed else float("inf")
        check(speedup <= most, f"{n}: speed-up {speedup:.2f}, bytes allow {ceiling:.2f}")
    check(not graphs.failed, "decode steps could not be captured")
    return found


def memory(sizes: Sizes, on: torch.device) -> dict[str, Any]:
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
    found = {"bytes_per_prompt": each, "predicted": predicted, "largest_batch": largest}
    if sizes.timed:
        off = abs(each / predicted - 1)
        check(off <= BYTES, f"a prompt takes {each:.3g} bytes, its cache has {predicted:.3g}")
        _generated(model, n, 2, "exact", StepGraphs(), int(0.95 * largest))
    return found


def second(sizes: Sizes, on: torch.device) -> dict[str, Any]:
    """The kernels and the methods on the last GPU, while the first is the current one."""
    if torch.cuda.device_count() < 2:
        return {"left_out": "one GPU"}
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    return {"parity": parity(sizes, last), "tokens": tokens(sizes, last)}


# --- all of them ---------------------------------------------------------------------------------


def main() -> int:
    """Exit status: 0 where every section passed."""
    names = ["device", "tests", "parity", "tokens", "kernels", "throughput", "memory", "second"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(names), help="sections, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu")
    parser.add_argument("--pytest", default="-m cuda tests", help="what the section tests runs")
    parser.add_argument("--small", action="store_true", help="sizes for a pretend GPU")
    given = parser.parse_args()
    only = given.only.split(",")
    if set(only) - set(names):
        parser.error(f"--only is {given.only!r}; allowed: {', '.join(names)}")
    if not torch.cuda.is_available():
        print("gpu_check needs a GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    sizes, on = (SMALL if given.small else Sizes()), torch.device("cuda", 0)
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "device": lambda: device(sizes, on),
        "tests": lambda: tests(given.pytest, 150.0 if sizes.timed else None),
        "parity": lambda: parity(sizes, on),
        "tokens": lambda: tokens(sizes, on),
        "kernels": lambda: kernels(sizes, on, device(sizes, on)),
        "throughput": lambda: throughput(sizes, on),
        "memory": lambda: memory(sizes, on),
        "second": lambda: second(sizes, on),
    }
    began = time.perf_counter()
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(on).lower()).strip("-")
    path = given.out / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"code_revision": provenance.code_revision(), "sections": {}}
    for section in (one for one in names if one in only):
        start = time.perf_counter()
        try:
            check(
                start - began < LIMIT or not sizes.timed,
                f"not begun after {LIMIT:g} s of the others",
            )
            found = {"passed": True, **run[section]()}
        except Exception as failure:  # noqa: BLE001 - the other sections are wanted all the same
            found = {"passed": False, "error": str(failure) or type(failure).__name__}
        found["seconds"] = round(time.perf_counter() - start, 1)
        report["sections"][section] = found
        path.write_text(json.dumps(report, indent=1) + "\n")
        said = "ok" if found["passed"] else f"FAILED: {found['error']}"
        print(f"{section:12} {found['seconds']:6.1f} s  {said}", flush=True)
        free_memory(on)
    print(path)
    return int(not all(found["passed"] for found in report["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())
