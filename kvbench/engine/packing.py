"""Short prompts of a batch in one pass of the model, one after the other in a single row.

Nothing is padded, and no mask is needed: positions begin anew with every prompt, and attention, which
is the engine's own, is taken of each prompt alone. Every prompt has its own `PrefillState`: it is
compressed, checked and charged as if it had come alone. On a CPU in float32 its keys, values and
queries are the same bits from four tokens on (tested for every architecture). Logits, shorter prompts
and everything in lower precision may differ in the last digits, as those of decoding do with the
batch. With ``batch_size=1`` nothing is packed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.architecture import rotary_of
from kvbench.engine.attention import LayerCall
from kvbench.engine.faults import free_memory, is_out_of_memory, release_frames
from kvbench.engine.fork import Fork
from kvbench.engine.guard import GENERATORS, Settings
from kvbench.engine.prefill import (
    Prefill,
    PrefillState,
    compressible_layers,
    forward_rows,
    input_device,
    mark_compressed,
    prefill,
    synchronize,
)
from kvbench.engine.rescore import TensorsWritten
from kvbench.engine.states import is_hybrid
from kvbench.errors import one_line

log = logging.getLogger(__name__)

PACK_TOKENS = {"cpu": 1024, "cuda": 4096}
"""Tokens of one pass, by type of device: about where a single prompt has it busy. Of longer prompts than
half of it none is packed, so that a pass takes no more memory than one prompt of moderate length."""

Work = tuple[Sequence[int], Sequence[Fork]]
"""A prompt's tokens, and its forks."""


def packable_tokens(model: PreTrainedModel) -> int:
    """Tokens of one pass; 0 where prompts cannot share one: layers that carry a state from token to
    token, and rotary frequencies that depend on the longest prompt."""
    config = model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (given, *given.values()) if isinstance(part, dict)}
    if is_hybrid(config) or kinds & {"dynamic", "longrope"}:
        return 0
    return PACK_TOKENS.get(input_device(model).type, 0)


def packs(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Neighbouring prompts that share a pass of at most so many tokens; a length of 0 marks a prompt
    that goes alone."""
    first, total, most = 0, 0, max(1, most)
    for place, length in enumerate(lengths):
        taken = length if 0 < 2 * length <= most else most
        if place > first and total + taken > most:
            yield slice(first, place)
            first, total = place, 0
        total += taken
    yield slice(first, len(lengths))


class PackedState:
    """Attention state of a pass over several prompts, each with a state of its own.

    Args:
        ends: where each prompt ends in the row.
    """

    def __init__(self, states: Sequence[PrefillState], ends: Sequence[int]) -> None:
        self.states = states
        self.bounds = list(zip([0, *ends], ends, strict=False))

    def attend(self, call: LayerCall) -> Tensor:
        """Each prompt's exact attention, and its compression on the way."""
        parts = zip(self.states, self.bounds, strict=True)
        return torch.cat([state.attend(call.of_row(0, *part)) for state, part in parts], dim=2)


def prefill_together(model: PreTrainedModel, work: Sequence[Work]) -> list[Prefill]:
    """`prefill` of several prompts in one pass. What fails as a whole (no memory, keys that are not
    finite, a method that writes to what others read) runs again in halves, down to single prompts,
    where it is told whose failure it is. Seconds without compression are divided by tokens."""
    if len(work) == 1:
        return [prefill(model, *work[0])]
    try:
        return _prefill_at_once(model, work)
    except TimeoutError:
        raise
    except Exception as failure:  # noqa: BLE001 - raised again by the prompt that is alone with it
        log.info("%d prompts in one pass: %s; again in halves", len(work), one_line(failure))
        release_frames(failure)
        if is_out_of_memory(failure):
            free_memory(input_device(model))
    for _, forks in work:
        for fork in forks:
            fork.restart()
    half = len(work) // 2
    return [*prefill_together(model, work[:half]), *prefill_together(model, work[half:])]


# See `prefill`.
@torch.inference_mode(False)
@torch.no_grad()
def _prefill_at_once(model: PreTrainedModel, work: Sequence[Work]) -> list[Prefill]:
    device, compressible = input_device(model), compressible_layers(model)
    lengths = [len(ids) for ids, _ in work]
    ends = torch.tensor(lengths).cumsum(0)
    states = []
    for ids, forks in work:
        mark_compressed(forks, len(ids))
        states.append(PrefillState(forks, compressible, closely=False, rotary=rotary_of(model)))
    tokens = torch.tensor([[token for ids, _ in work for token in ids]], device=device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    generators = Settings.now(GENERATORS)
    synchronize(device)
    start = time.perf_counter()
    packed = PackedState(states, ends.tolist())
    logits = forward_rows(model, tokens, positions, packed, (ends - 1).to(device))[0]
    synchronize(device)
    compress_s = sum(state.settle() for state in states)
    if generators.restore_changed():
        raise TensorsWritten(culprit_known=False)
    per_token = (time.perf_counter() - start - compress_s) / sum(lengths)
    for state in states:
        state.store_states()
    return [
        Prefill(logits[place], per_token * n, states[place].exact_bytes, n)
        for place, n in enumerate(lengths)
    ]
