"""Whether memory stays flat over a stream: peak memory and tokens per second, by tokens read.

python scripts/benchmarks/bench_stream.py [--tokens 1000000] [--recent 508] [--model asset:recall_mini]
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.loading import ModelSpec, load_model
from kvbench.engine.streaming import StreamState, rotation_of, stream


def main() -> None:
    """Print a row for every tenth of the stream."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--start", type=int, default=4)
    parser.add_argument("--recent", type=int, default=508)
    parser.add_argument("--model", default="asset:recall_mini")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = ModelSpec(name="model", path=given.model)
    model = load_model(spec, device=device, dtype=dtype, seed=0)
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocab, (given.tokens,), generator=generator).tolist()
    with kvbench_attention_on(model):
        state = StreamState(given.start, given.recent, rotation_of(model))
        read, shown, clock = 0, 0, time.perf_counter()
        for part in stream(model, ids, start=given.start, recent=given.recent, state=state):
            assert torch.isfinite(part).all()
            read += len(part)
            if read - shown >= given.tokens // 10:
                shown, seconds = read, time.perf_counter() - clock
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(
                    f"{read:>9,} tokens, {read / seconds:,.0f} a second, {state.held_bytes:,} bytes, "
                    f"peak {peak:.0f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
