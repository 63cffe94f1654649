"""What the second pass of KVzip, KVzip+ and KVgrad takes beside the exact prefill.

    python scripts/benchmarks/bench_second_pass.py [--tokens 1024] [--runs 3] [--skip-8b]

Measured on SmolLM2: processor seconds of the second pass, scores included, over those of the prefill,
and the process's largest memory beyond that of a job of `exact`. Estimated for Llama-3.1-8B in 16 bits:
the bytes that the graph of one of KVgrad's chunks holds, from one layer of that shape with random
weights and what torch's hooks see stored, times the layers; and multiplications, counted by hand.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import torch
from _shared import LLAMA_8B
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvbench import load_model
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.device import peak_bytes, reset_peak
from kvbench.engine.prefill import forward, prefill
from kvbench.engine.row import Row
from kvbench.engine.second_pass import Chunk, ReplayPass, frozen
from kvbench.kv import Budget
from kvbench.methods import build_method

METHODS = ("kvzip", "kvzip_plus", "kvgrad")
WORDS = 32
"""About how many tokens the instruction and what opens an answer take."""
CPU = torch.device("cpu")
MIB = 1 << 20


def measure(tokens: int, runs: int) -> None:
    model, _ = load_model("smollm2_135m")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 40000, (tokens,), generator=generator).tolist()
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    read = ReplayPass.read
    for run in range(runs + 1):
        for name in ("exact", *METHODS):
            passes: list[float] = []

            def timed(*given: Any, passes: list[float] = passes) -> None:
                start = time.process_time()
                read(*given)
                passes.append(time.process_time() - start)

            options: dict[str, Any] = {} if name == "exact" else {"instructed": False}
            row = Row(name, build_method(name, **options), Budget(rate=0.25), 0, "x")
            reset_peak(CPU)
            start = time.process_time()
            with kvbench_attention_on(model), mock.patch.object(ReplayPass, "read", timed):
                prefill(model, ids, [row])
            total = time.process_time() - start
            if row.failure is not None:
                raise row.failure
            if run:  # the first warms up
                seconds.setdefault(name, []).append(passes[0] if passes else total)
                peaks[name] = max(peaks.get(name, 0), peak_bytes(CPU) or 0)
    exact = statistics.median(seconds["exact"])
    print(f"SmolLM2-135M, {tokens} tokens, float32: exact prefill {exact:.2f} s of processor time")
    for name in METHODS:
        taken = statistics.median(seconds[name])
        more = (peaks[name] - peaks["exact"]) / MIB
        print(f"{name:12} {taken:6.2f} s, {taken / exact:.2f} of the prefill; {more:+.0f} MiB")


def one_layer() -> PreTrainedModel:
    shape: Any = {**LLAMA_8B, "num_hidden_layers": 1, "vocab_size": 64}
    config = AutoConfig.for_model(**shape)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def graph_bytes(model: Any, n: int, tokens: int) -> int:
    """The bytes that the graph of a pass over `tokens` tokens after n holds for a layer, without the
    layer's weights."""
    config = model.config
    shape = (1, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads)
    weights = {part.untyped_storage().data_ptr() for part in model.parameters()}
    stored: dict[int, Any] = {}  # the storages are kept alive, so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_mask = tensor.shape[-2:] == (tokens, n + tokens)  # which a GPU's kernel does without
        if storage.data_ptr() not in weights and not is_mask:
            stored[storage.data_ptr()] = storage
        return tensor

    replay = ReplayPass(
        exact_cache={0: (torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16())},
        blocks={0: model.model.layers[0].self_attn},
        chunk=Chunk(0, tokens, [1] * tokens),
    )
    asked = build_method("kvgrad").second_pass
    assert asked is not None
    positions = torch.arange(n, n + tokens)
    with (
        kvbench_attention_on(model),
        torch.enable_grad(),
        frozen(model),
        replay.seen.hooked(model, replay.blocks, asked),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        # The graph of later layers begins before the first block, as here by the embeddings.
        hooks = model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: output.requires_grad_()
        )
        forward(model, torch.ones(1, tokens, dtype=torch.long), positions, replay, keep=1)
        hooks.remove()
    return sum(storage.nbytes() for storage in stored.values())


def multiplications(n: int, chunk: int | None, *, backward: bool, projected: bool) -> float:
    """Those of a layer of Llama-3.1-8B: of a prefill of n tokens (`chunk` None), or of a second pass."""
    hidden, wide, kv = 4096, 14336, 1024
    weights = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * wide
    if chunk is None:
        return weights * n + hidden * n * n  # half of 2 hidden n^2: causal
    total = 0.0
    for start in range(0, n, chunk):
        part = min(chunk, n - start)
        t = part + WORDS
        attention = 2 * hidden * t * (n + t / 2)
        total += (weights * t + attention) * (1 + backward) + backward * attention / 2
        total += hidden * t * (part + t / 2)  # the scores
        total += projected * hidden * hidden * part  # values times the output projection
    return total


def estimate() -> None:
    model, layers = one_layer(), LLAMA_8B["num_hidden_layers"]
    assert isinstance(layers, int)
    print("Llama-3.1-8B in 16 bits, by estimate; the pass's multiplications over the prefill's")
    print("tokens   exact cache   kvgrad's graph   kvzip   kvzip_plus   kvgrad")
    for n in (1024, 4096, 16384):
        cache = layers * n * 2 * 1024 * 2 / MIB
        graph = layers * graph_bytes(model, n, 512 + WORDS) / MIB
        prefill_of = multiplications(n, None, backward=False, projected=False)
        ratios = [
            multiplications(n, 2000, backward=False, projected=False) / prefill_of,
            multiplications(n, 2000, backward=False, projected=True) / prefill_of,
            multiplications(n, 512, backward=True, projected=True) / prefill_of,
        ]
        shown = "{:8.2f} {:10.2f} {:9.2f}".format(*ratios)
        print(f"{n:6} {cache:9.0f} MiB {graph:12.0f} MiB {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--skip-8b", action="store_true")
    options = parser.parse_args()
    measure(options.tokens, options.runs)
    if not options.skip_8b:
        estimate()


if __name__ == "__main__":
    main()
