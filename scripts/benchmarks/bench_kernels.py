"""Times the hot operations: torch reference, Triton kernel, and the floor that the device sets.

    python scripts/benchmarks/bench_kernels.py  # on CUDA where there is a device, else on the CPU
    python scripts/benchmarks/bench_kernels.py --device cpu --threads 1 --only attention_mass

Prints a table and writes <--out>/<device>.json (runs/bench/cpu.json) with device, versions, commit and
command; results/bench/cpu.json is one that was kept. On a CPU all rows take minutes.

The floor of a row is the larger of two times: the fewest bytes over the device's copy rate, and the
fewest floating-point operations (two per multiply-add) over its matrix-product rate. Both rates are
measured first, in the same process (copy: bytes read plus bytes written of a large copy). A row's
formula is in its `floor_formula`:

    balanced_halving   bytes: keys and values once, draws and signs once;
                       flops: b^2 d multiply-adds x 2 (keys, values) per block
    decode_attention   bytes: keys and values of the entries held, once
    attention_mass     flops: one causal q.k (summing columns in O(n) memory takes two)
    cut                bytes: signs, order and weights read, half of the latter written

Compression rows are one layer of `Method.compress`, everything included. On CUDA the kernels' results
are compared with the reference's (`agreement`: relative error, or share of equal choices; where float32
cannot tell one sign, all later ones of its block may differ).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_compress import block_products
from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.kernels._choice import VARIABLE
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kernels.decode_attention import weighted_decode_attention
from kvbench.kernels.entry_table import EntryTable, entry_table
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.run import provenance

KV_HEADS, DIM = 8, 128
"""Of a Llama-3.1-8B layer, whose group is 4."""


@dataclass
class Row:
    """One line of the table; seconds are medians. `triton_s` is None where Triton did not run.

    `beside` names another computation of the same size, which was timed in turn with the row, call by
    call; `beside_s` are its seconds.
    """

    operation: str
    size: str
    torch_s: float
    triton_s: float | None = None
    floor_s: float | None = None
    floor_by: str | None = None
    floor_formula: str = ""
    agreement: float | None = None
    beside: str | None = None
    beside_s: float | None = None

    @property
    def best_s(self) -> float:
        """Seconds of the Triton kernel, or of torch where it did not run."""
        return self.torch_s if self.triton_s is None else self.triton_s


@dataclass
class Case:
    """An operation to time.

    Attributes:
        run: the operation, by the name of an implementation ("torch" or "triton").
        bytes, flops: the fewest that it takes, by `formula`.
        agree: compares the results of two implementations.
        beside: name and function of another computation to time in turn with it.
    """

    operation: str
    size: str
    run: Callable[[str], Any]
    bytes: float = 0.0
    flops: float = 0.0
    formula: str = ""
    agree: Callable[[Any, Any], float] | None = None
    beside: tuple[str, Callable[[], object]] | None = None


class Bench:
    """Times cases on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.copy_rate = self._copy_rate()
        self.matmul_rate = self._matmul_rate()

    def seconds(self, *runs: Callable[[], object]) -> list[float]:
        """Median seconds of a call of each, after a warm-up.

        On a CPU the calls take turns, so that what else the machine does disturbs all alike. On CUDA
        they run one after the other, between device events, with cold caches.
        """
        if self.cuda:
            from triton.testing import do_bench

            options = {"warmup": 50, "rep": 50 * self.repeats, "return_mode": "median"}
            return [do_bench(run, **options) / 1e3 for run in runs]
        for run in runs:
            run()
        times_of_runs: list[list[float]] = [[] for _ in runs]
        for _ in range(self.repeats):
            for times, run in zip(times_of_runs, runs, strict=True):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
        return [statistics.median(times) for times in times_of_runs]

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Normal numbers of the device's generator."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device).to(self.dtype)

    def _copy_rate(self) -> float:
        """Bytes a second that the device reads and writes when it copies."""
        source = torch.empty(1 << (30 if self.cuda else 28), dtype=torch.uint8, device=self.device)
        source.random_()
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda: target.copy_(source))[0]

    def _matmul_rate(self) -> float:
        """Floating-point operations a second of the device's matrix products."""
        n = 8192 if self.cuda else 2048
        a, b = self.normal(n, n), self.normal(n, n, seed=1)
        return 2 * n**3 / self.seconds(lambda: a @ b)[0]

    def measure(self, case: Case) -> Row:
        """Time a case, and compare its implementations where Triton runs."""
        runs: list[Callable[[], object]] = [lambda: case.run("torch")]
        if case.beside is not None:
            runs.append(case.beside[1])
        if self.cuda:
            runs.append(lambda: case.run("triton"))
        times = self.seconds(*runs)
        row = Row(case.operation, case.size, times[0])
        if case.beside is not None:
            row.beside, row.beside_s = case.beside[0], times[1]
        if self.cuda:
            row.triton_s = times[-1]
            if case.agree is not None:
                row.agreement = case.agree(case.run("triton"), case.run("torch"))
        if case.formula:
            by_bytes, by_flops = case.bytes / self.copy_rate, case.flops / self.matmul_rate
            row.floor_s = max(by_bytes, by_flops)
            row.floor_by = "bytes" if by_bytes >= by_flops else "flops"
            row.floor_formula = case.formula
        return row


@contextmanager
def forced(implementation: str) -> Iterator[None]:
    """Within the context every kernel that is called without a choice runs as this implementation."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = implementation
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def relative_error(measured: Any, expected: Any) -> float:
    """||measured - expected|| / ||expected|| of tensors, or of the first tensors of tuples."""
    if isinstance(measured, tuple):
        measured, expected = measured[0], expected[0]
    return float((measured.double() - expected.double()).norm() / expected.double().norm())


def equal_share(measured: Any, expected: Any) -> float:
    """Share of equal elements of tensors, or of the first tensors of tuples."""
    if isinstance(measured, tuple):
        measured, expected = measured[0], expected[0]
    return float((measured == expected).double().mean())


def halvings(bench: Bench, n: int) -> Iterator[Case]:
    """Signs of one halving of n tokens, with normal keys and with keys whose exponentials overflow; and
    the cut."""
    keys, values = bench.normal(1, KV_HEADS, n, DIM), bench.normal(1, KV_HEADS, n, DIM, seed=1)
    item = keys.element_size()
    for b, norm in ((64, 1.0), (128, 1.0), (256, 1.0), (256, 4.0)):
        shape = (1, KV_HEADS, n // b, b)
        index = torch.arange(n, device=bench.device).expand(1, KV_HEADS, n).reshape(shape)
        uniforms = torch.rand(shape, device=bench.device)
        scaled = keys * norm

        def run(
            implementation: str, k: Tensor = scaled, i: Tensor = index, u: Tensor = uniforms
        ) -> Tensor:
            return balanced_walk(
                k, values, i, u, gamma=4.0, offset=0.025, implementation=implementation
            )

        yield Case(
            "balanced_halving",
            f"n={n} b={b}" + (" large norms" if norm > 1 else ""),
            run,
            bytes=KV_HEADS * n * (2 * DIM * item + 4 + 1),
            flops=KV_HEADS * n // b * 2 * (2 * b * b * DIM),
            formula="heads n (2 d itemsize + 5) bytes; heads n/b * 2 * 2 b^2 d flops",
            agree=equal_share,
        )
    positive = torch.rand(1, KV_HEADS, n, device=bench.device) < 0.5
    order = torch.arange(n, device=bench.device).expand(1, KV_HEADS, n).contiguous()
    weights = torch.ones(1, KV_HEADS, n, device=bench.device)
    yield Case(
        "cut",
        f"n={n}",
        lambda implementation: halve(positive, order, weights, implementation=implementation),
        bytes=KV_HEADS * n * (1 + 12 + 6),
        formula="heads n (1 + 12 + 6) bytes",
        agree=equal_share,
    )


def decoding(bench: Bench, n: int, rows: int) -> Iterator[Case]:
    """One token per row over n entries and over a quarter of them, in buffers of the same size."""
    keys = [bench.normal(KV_HEADS, n, DIM, seed=row) for row in range(rows)]
    values = [bench.normal(KV_HEADS, n, DIM, seed=rows + row) for row in range(rows)]
    log_weights = [torch.zeros(KV_HEADS, n, device=bench.device) for _ in range(rows)]
    query = bench.normal(rows, 4 * KV_HEADS, DIM)
    plain, weighted = entry_table(keys, values), entry_table(keys, values, log_weights)
    item = query.element_size()
    for entries, table, mass in (
        (n, plain, False),
        (n, plain, True),
        (n, weighted, False),
        (n // 4, weighted, False),
    ):
        lengths = torch.full((rows,), entries, device=bench.device)

        def run(
            implementation: str,
            table: EntryTable = table,
            lengths: Tensor = lengths,
            mass: bool = mass,
        ) -> tuple[Tensor, Tensor | None]:
            return weighted_decode_attention(
                query,
                table,
                lengths,
                scaling=DIM**-0.5,
                return_mass=mass,
                implementation=implementation,
            )

        extra = (" weights" if table is weighted else "") + (" mass" if mass else "")
        yield Case(
            "decode_attention",
            f"rows={rows} entries={entries}{extra}",
            run,
            bytes=rows * KV_HEADS * entries * (2 * DIM * item + (4 if table is weighted else 0)),
            flops=rows * 4 * KV_HEADS * entries * 4 * DIM,
            formula="rows kv_heads entries (2 d itemsize [+ 4]) bytes; rows heads entries 4 d flops",
            agree=relative_error,
        )


def masses(bench: Bench, sizes: list[tuple[int, int, int]]) -> Iterator[Case]:
    """Attention mass of (heads, m, n), beside one exact causal attention of the same size."""
    for heads, m, n in sizes:
        kv_heads = heads if heads < KV_HEADS else KV_HEADS
        queries, keys = bench.normal(1, heads, m, DIM), bench.normal(1, kv_heads, n, DIM, seed=1)
        values = bench.normal(1, kv_heads, n, DIM, seed=2)
        item = keys.element_size()
        pairs = m * (n - m) + m * (m + 1) // 2
        normalisers = None
        if m == n:  # as in a prefill, whose attention computes them on a CPU, too
            call = LayerCall(0, queries, keys, values, DIM**-0.5)
            normalisers = call.exact_with_normalisers()[1]

        def run(
            implementation: str,
            queries: Tensor = queries,
            keys: Tensor = keys,
            normalisers: Tensor | None = normalisers,
        ) -> Tensor:
            return attention_mass(
                queries,
                keys,
                scaling=DIM**-0.5,
                normalisers=normalisers,
                implementation=implementation,
            )

        def exact(q: Tensor = queries, k: Tensor = keys, v: Tensor = values) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield Case(
            "attention_mass",
            f"heads={heads} queries={m} n={n}",
            run,
            bytes=(heads * m + kv_heads * n) * DIM * item + heads * n * 4,
            flops=2 * heads * pairs * DIM,
            formula="(heads m + kv_heads n) d itemsize + 4 heads n bytes; 2 heads (pairs) d flops",
            agree=relative_error,
            beside=("exact attention (sdpa)", exact) if m == n else None,
        )


def compressions(bench: Bench, n: int, heads: int) -> Iterator[Case]:
    """One layer of `compress`, all of it, at rate 0.25."""
    keys, values = bench.normal(1, KV_HEADS, n, DIM), bench.normal(1, KV_HEADS, n, DIM, seed=1)
    queries = bench.normal(1, heads, n, DIM, seed=2)
    budget = Budget(rate=0.25)
    for name in ("uniform", "snapkv", "balancekv", "h2o", "subgen"):
        method = build_method(name)

        def run(implementation: str, method: Method = method) -> object:
            with forced(implementation):
                layer = LayerKV(keys, values, queries, 0, 1, DIM**-0.5)
                return method.compress(layer, budget, torch.Generator().manual_seed(0))

        beside = None
        if name == "balancekv":
            products = block_products(n, KV_HEADS, DIM, 256, 2, bench.device, bench.dtype)
            beside = ("its block products", products)
        yield Case("compress", f"{name} n={n}", run, beside=beside)


def cases(bench: Bench) -> Iterator[Case]:
    """All cases, at sizes that the device finishes in minutes."""
    if bench.cuda:
        yield from halvings(bench, 16384)
        yield from halvings(bench, 131072)
        yield from decoding(bench, 16384, 8)
        yield from decoding(bench, 131072, 1)
        yield from masses(bench, [(32, 16384, 16384), (32, 32, 16384), (32, 32, 131072)])
        yield from compressions(bench, 16384, 32)
    else:
        yield from halvings(bench, 16384)
        yield from decoding(bench, 16384, 1)
        yield from masses(bench, [(8, 8192, 8192), (32, 32, 16384)])
        yield from compressions(bench, 16384, KV_HEADS)


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds of three digits, None as a dash."""
    return "-" if seconds is None else f"{1e3 * seconds:.3g}"


def table(rows: list[Row]) -> str:
    """The rows as text, in milliseconds."""
    header = [
        "operation",
        "size",
        "torch ms",
        "triton ms",
        "floor ms",
        "by",
        "floor/time",
        "agreement",
        "beside",
    ]
    lines = [header]
    for row in rows:
        share = "-" if row.floor_s is None else f"{row.floor_s / row.best_s:.2f}"
        agreement = "-" if row.agreement is None else f"{row.agreement:.3g}"
        times = map(milliseconds, (row.torch_s, row.triton_s, row.floor_s))
        by = row.floor_by or "-"
        beside = "-"
        if row.beside_s is not None:
            beside = f"{row.best_s / row.beside_s:.2f} x {row.beside}"
        lines.append([row.operation, row.size, *times, by, share, agreement, beside])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def plain_name(device: torch.device) -> str:
    """cpu, or the GPU's name in lower case with dashes."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def main() -> None:
    """Measure the cases, print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu | cuda (default: cuda if there)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    bench = Bench(device, args.repeats)
    print(
        f"{device}: copy {bench.copy_rate / 1e9:.1f} GB/s, "
        f"{bench.dtype} products {bench.matmul_rate / 1e12:.3f} TFLOP/s"
    )
    rows = []
    for case in cases(bench):
        if args.only in case.operation:
            rows.append(bench.measure(case))
            print(f"{case.operation}, {case.size}: {milliseconds(rows[-1].best_s)} ms", flush=True)
    print("\n" + table(rows))
    reason = "" if bench.cuda else "no CUDA device: Triton kernels were not timed"
    if reason:
        print(reason)
    report = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python scripts/benchmarks/" + provenance.command(),
        "code_revision": provenance.code_revision(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(device),
        "dtype": str(bench.dtype),
        "copy_bytes_per_s": bench.copy_rate,
        "matmul_flops_per_s": bench.matmul_rate,
        "triton": reason or "timed",
        "rows": [asdict(row) for row in rows],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{plain_name(device)}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
