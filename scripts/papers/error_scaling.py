"""Error against memory: the bound that BalanceKV and SubGen prove, measured.

Both papers bound the error of a single query (BalanceKV, arXiv 2502.07861, equation (2); SubGen,
arXiv 2402.06082, in its main theorem):

    ||z - Attn(q, K, V)||_2  <=  eps * ||softmax(K q / sqrt(d))||_2 * ||V||_F

with memory proportional to 1 / eps^2 (SubGen, as for independent samples) or 1 / eps (BalanceKV,
up to logarithms and a factor exponential in the norms). So eps against the entries held has slope
-1/2 or -1 on logarithmic axes: that is what this script measures, for n entries that are compressed
to more and more of them, without sink or window, and asked by queries that see all n.

BalanceKV's block form: the signed sums of different blocks add up like independent errors, so that
after T halvings of n entries in blocks of b the error is about 2^T / n * sqrt(n / (2^T b)) =
1 / sqrt(kept * b): slope -1 only while one block is kept, then -1/2. Blocks that grow with what is
kept (MergeAndReduce's batches) keep the slope at -1.

    kvbench reproduce error_scaling       compressed prompts: random data, and the layers of SmolLM2
    kvbench reproduce balancekv_theorem3_1        the algorithms of the theorems, one token at a time
    kvbench reproduce balancekv_theorem3_1 model=recall_mini      smaller
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from _bounded import BoundedData, bound_scale
from _common import Run, method_with, started
from scipy.stats import linregress, ttest_1samp
from torch import Tensor

from kvbench.engine.check import check_finite
from kvbench.engine.row import layer_generator
from kvbench.errors import UserError, check_known
from kvbench.kv import Budget, LayerKV, keep_all
from kvbench.methods.base import SEED_STRIDE, Method
from kvbench.probes.layer_error import compress_measured, estimate

DATA: Mapping[str, Mapping[str, Any]] = {
    "d 4, bound 1": {"head_dim": 4, "key_norm": 1.414, "query_norm": 1.414},
    "d 16, bound 1": {"head_dim": 16, "key_norm": 2.0, "query_norm": 2.0},
    "d 64, bound 1": {"head_dim": 64, "key_norm": 2.828, "query_norm": 2.828},
    "d 64, bound 4": {"head_dim": 64, "key_norm": 5.657, "query_norm": 5.657},
    "d 64, bound 16": {"head_dim": 64, "key_norm": 11.314, "query_norm": 11.314},
    "d 64, bound 4, 64 clusters": {
        "head_dim": 64,
        "key_norm": 5.657,
        "query_norm": 5.657,
        "clusters": 64,
    },
}
"""Options of `BoundedData` by name; the bound is that of the logits, key_norm * query_norm / sqrt(d)."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "uniform": {},
    "subgen": {},
    "subgen_weighted": {"name": "subgen", "weights": "cluster"},
    "balancekv": {},
    # blocks of as many entries as are kept, as in the paper's MergeAndReduce
    "balancekv_wide": {"name": "balancekv", "per_kept": {"block_size": 1.0}},
}
"""Options of methods by label; ``name`` of the method where the label is another. Each option in
``per_kept`` is max(2, round(factor * kept))."""


@dataclass(frozen=True)
class Sample:
    """A layer of n entries and the queries after them, and one draw of the methods.

    Attributes:
        where: columns of its rows: the data set or layer, the repetition, and the prompt.
        seed, source: what the draws of the methods are seeded with, beside `kept`.
    """

    where: Mapping[str, str]
    seed: int
    source: str
    layer: LayerKV
    queries: Tensor


def samples(run: Run) -> Iterator[Sample]:
    """Random data are drawn anew for every draw of the methods; a model's layers stay."""
    if run.synthetic:
        for draw, (name, options) in product(range(run.draws), data_sets(run.data).items()):
            seed = SEED_STRIDE * run.seed + draw
            layer, queries = BoundedData(**options).layer(run.n, run.queries, name, seed)
            where = {"dataset": name, "replicate": f"draw{draw}"}
            yield Sample(where, seed, f"{name}/draw{draw}", layer, queries)
        return
    needed = run.n + run.queries
    for prompt, ids in run.prompts():
        if len(ids) < needed:
            raise UserError(
                f"prompt {prompt!r} has {len(ids)} tokens; allowed: {needed} (n + queries) or more"
            )
        for number, whole in run.captured(ids[:needed], run.layers):
            assert whole.queries is not None
            keys, values, queries = (
                x[:, :, : run.n] for x in (whole.keys, whole.values, whole.queries)
            )
            layer = replace(whole, keys=keys, values=values, queries=queries, shared={})
            check_finite(layer)
            for draw in range(run.draws):
                name, replicate = f"layer {number}", f"{prompt}-draw{draw}"
                where = {"dataset": name, "replicate": replicate, "prompt": prompt}
                seed = SEED_STRIDE * run.seed + draw
                after = whole.queries[:, :, run.n :]
                yield Sample(where, seed, f"{name}/{replicate}", layer, after)


def data_sets(data: Any) -> Mapping[str, Mapping[str, Any]]:
    """Options by name, of the names in `DATA` or as they are given."""
    if isinstance(data, Mapping):
        return data
    for name in data:
        check_known(f"data has {name!r}", str(name), [*DATA], UserError)
    return {name: DATA[name] for name in data}


def sized(label: str, options: Mapping[str, Any], kept: int) -> Method:
    """The method of a label of `METHODS` at `kept` entries."""
    others = dict(options)
    factors = others.pop("per_kept", {})
    others |= {option: max(2, round(factor * kept)) for option, factor in factors.items()}
    return method_with(others, label)


def rows_of(
    sample: Sample, sizes: Sequence[int], methods: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A row for each number of entries and method. `scaled_error` is the mean over queries and heads of
    ||z - Attn||_2 / (||softmax||_2 ||V||_F), in float64; `held` are the entries that the method really
    holds, which streaming forms hold more of than they are asked to."""
    layer, queries = sample.layer, sample.queries
    exact = estimate(keep_all(layer), queries, layer.n, layer)
    scale = bound_scale(layer, queries)
    for kept, (label, options) in product(sizes, methods.items()):
        budget = Budget(rate=kept / layer.n, sink=0, window=0)
        generator = layer_generator(sample.seed, f"{sample.source}/{kept}", 0)
        method = sized(label, options, kept)
        compressed, cost = compress_measured(label, method, budget, generator, layer)
        z = estimate(compressed, queries, layer.n, layer)
        error = torch.linalg.vector_norm(z - exact, dim=-1) / scale
        row = {**sample.where, "method": label, "kept": kept, "held": cost["entries"]["mean"]}
        yield row | {"ratio": cost["ratio"], "scaled_error": float(error.mean())}


def slopes(frame: pd.DataFrame) -> pd.DataFrame:
    """The least-squares slope of the logarithm of the error against that of the entries held: a row for
    each data set, method and repetition (draw of random data, prompt of a model). A method without
    error, the exact cache, has no slope."""
    unit = "prompt" if "prompt" in frame else "replicate"
    names = ["dataset", "method", unit]
    rows = []
    frame = frame[frame["scaled_error"] > 0]
    for key, part in frame.groupby([*names, "replicate"], sort=False):
        if part["held"].nunique() > 1:
            x, y = (np.log(part[name].to_numpy(float)) for name in ("held", "scaled_error"))
            rows.append([*key[:3], float(linregress(x, y).slope)])
    of_draws = pd.DataFrame(rows, columns=[*names, "slope"])
    return of_draws.groupby(names, sort=False, as_index=False).mean()


def with_intervals(slopes_of_units: pd.DataFrame) -> pd.DataFrame:
    """The mean slopes and their 95 % t intervals over repetitions, as text: data sets by methods."""

    def text(values: pd.Series) -> str:
        if len(values) < 2:
            return f"{values.mean():.3f}"
        low, high = ttest_1samp(values, 0.0).confidence_interval()
        return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"

    groups = slopes_of_units.groupby(["dataset", "method"], sort=False)["slope"]
    return groups.apply(text).unstack()


def main(arguments: Sequence[str]) -> None:
    """Write a row for each data set or layer, repetition, number of entries and method; print the
    slopes, and write those of the repetitions as a second table, <model>_slopes.

    Keys of its own: n, kept, queries, draws, methods (see METHODS), data (names in DATA, or options of
    BoundedData by name), fit (slopes are of the kept up to this share of n: nearer to n sampling without
    replacement gains by exhausting what there is to sample); synthetic=false and layers for a model's
    layers, of prompts of n + queries tokens at the least.
    """
    run = Run(
        __file__,
        arguments,
        "",
        "",
        n=16384,
        kept=[64, 128, 256, 512, 1024, 2048, 4096, 8192],
        queries=64,
        draws=4,
        methods=METHODS,
        data=list(DATA),
        fit=0.25,
        layers=[1, 2, 3, 4],
    )
    if max(run.kept) > run.n:
        raise UserError(f"kept is {run.kept}; allowed: at most n, {run.n}")
    frame = pd.DataFrame(
        row for sample in samples(run) for row in rows_of(sample, run.kept, run.methods)
    )
    # A line of a figure has one x for all repetitions of a size.
    sizes = frame.groupby(["dataset", "method", "kept"])["held"]
    frame["entries"] = sizes.transform("mean")
    rows: Any = frame.to_dict("records")
    run.save(rows, y="scaled_error", x="entries", by="method", panel="dataset", log=True)
    fitted_to = f"{run.fit * run.n:.0f} entries kept"
    found = slopes(frame[frame["kept"] <= run.fit * run.n])
    if found.empty:
        print(f"no slopes: up to {fitted_to} there are fewer than two sizes, or no errors")
        return
    print(f"slopes up to {fitted_to}:\n{with_intervals(found).to_string()}")
    rows = found.assign(**{"fitted to": fitted_to}).to_dict("records")
    run.save(rows, y="slope", x="dataset", by="method", panel="fitted to", part="slopes")


if __name__ == "__main__":
    started(main)
