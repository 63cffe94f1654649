"""What teacher-forced scoring of many methods costs: seconds per scored token and peak memory.

python scripts/benchmarks/bench_scoring.py [--prompt 4096] [--tokens 64] [--model DIR]

Every method's scores of one continuation, from one prefill, against one exact forward pass of
transformers over the same tokens, in turn; medians are compared. The target is 1.5 times that pass
for eight methods together.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch

from kvbench.cli.catalogue import catalogue
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.loading import ModelSpec, load_model
from kvbench.engine.scoring import read, score
from kvbench.kv import Budget
from kvbench.methods import build_method

EIGHT = ("exact", "streaming_llm", "uniform", "snapkv", "pyramidkv", "h2o", "topk", "local")
SLOWER = ("subgen", "balancekv")


def clock() -> float:
    """Seconds; on one core those of the processor, which others on the machine change less."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of(run: Callable[[], object]) -> float:
    """Of one run."""
    start = clock()
    run()
    return clock() - start


def main() -> None:
    """Print one row per set of methods."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="asset:recall_mini")
    given = parser.parse_args()
    assert set(EIGHT) | set(SLOWER) <= set(catalogue("methods"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = ModelSpec(name="model", path=given.model)
    model = load_model(spec, device=device, dtype=dtype, seed=0)
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocab, (given.prompt + given.tokens,), generator=generator).tolist()
    prompt, answer = ids[: given.prompt], ids[given.prompt :]
    whole = torch.tensor([ids[:-1]], device=device)

    @torch.inference_mode()
    def plain() -> None:
        implementation = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        model(input_ids=whole, use_cache=False, logits_to_keep=given.tokens)
        model.set_attn_implementation(implementation)

    def scored(names: tuple[str, ...]) -> None:
        methods = {name: built[name] for name in names}
        with kvbench_attention_on(model):
            reading = read(model, prompt, methods, seed=0, example_id="x", room=given.tokens)
            begun = clock()
            for label, (one,) in score(model, reading, [answer]).items():
                assert one.failure is None, (label, one.failure)
            feeding[names] = clock() - begun

    built = {name: (build_method(name), Budget()) for name in (*EIGHT, *SLOWER)}
    feeding: dict[tuple[str, ...], float] = {}
    plain()
    base = seconds_of(plain)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{given.prompt} + {given.tokens} tokens on {device}; one exact forward {base:.3f} s")
    print(f"peak memory {peak:.0f} MiB after it")
    for names in (("exact",), EIGHT, (*EIGHT[:6], *SLOWER)):
        # in turn, as the machine's speed changes
        pairs = [
            (seconds_of(plain), seconds_of(lambda: scored(names)))  # noqa: B023
            for _ in range(given.repeats)
        ]
        base, seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        each = 1000 * seconds / (given.tokens * len(names))
        print(
            f"{len(names)} methods {seconds:.3f} s, {seconds / base:.2f} times; {each:.2f} ms per "
            f"scored token; of it {feeding[names]:.3f} s after prefill and compression; peak "
            f"{peak:.0f} MiB: {', '.join(names)}"
        )


if __name__ == "__main__":
    main()
