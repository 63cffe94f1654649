"""Decode steps as captured CUDA graphs: one launch for each token instead of a thousand (`Steps`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvbench.engine.device import is_out_of_memory
from kvbench.engine.rotary import table_change
from kvbench.engine.states import is_hybrid
from kvbench.errors import first_line
from kvbench.kv import KVError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

DECODES = ("auto", "eager", "graph", "compiled")
"""How decode steps run. ``eager`` never captures them; the others do where it is possible. ``compiled``
also has torch compile the model for the steps, which takes seconds and fuses a layer's norms and
position encoding: a layer then has 12 launches and the three of our attention, where it has 44
otherwise."""
FIRST_STEPS = 3
"""How many steps of a batch run before one is captured, so that every kernel is compiled and every
library has been set up."""
WORTH_STEPS = 16
"""The least number of steps to come for which capturing saves more time than it takes."""


def check_decode(value: object, device: torch.device) -> str:
    """Check an option `decode`, and return it.

    Raises:
        KVError: it is not one of `DECODES`, or is not possible on the device.
    """
    if value not in DECODES:
        raise KVError(f"decode is {value!r}; allowed: {', '.join(DECODES)}")
    if value == "graph" and device.type != "cuda":
        others = ", ".join(other for other in DECODES if other != value)
        raise KVError(f"decode is 'graph' and the device is {device}; allowed there: {others}")
    return str(value)


class CapturedStep(NamedTuple):
    """A captured step: the function that replays it, and the tensors that it reads and writes."""

    replay: Callable[[], Tensor]
    tensors: Sequence[Tensor]


class Steps:
    """How the decode steps of one model run, and the steps of it that have been captured as CUDA graphs.

    A captured step is replayed for the tokens that follow and for later batches of the same kind. This
    is correct because all steps of a batch make the same launches on the same buffers: the new token's
    id and position, the number of entries of every row, their addresses and the entries themselves are
    read and written on the device. If a step cannot be captured, the steps run without capture, and a
    warning says so once.

    Args:
        decode: one of `DECODES`.
        most_kept: the largest number of captured steps that are kept, each of which holds the memory of
            a step; 0 where the model may change between two batches (its adapters, its hooks, its
            device).

    Attributes:
        failed: whether a capture has failed; then no other is tried.
        said: whether it was said that processed logits are not captured.
        kept: the captured steps by their key (`capture`).
    """

    def __init__(self, decode: str = "auto", most_kept: int = 6) -> None:
        self.decode = decode
        self.most_kept = most_kept
        self.failed = False
        self.said = False
        self.kept: dict[Hashable, CapturedStep] = {}
        self._compiled: Any = None

    def model_for_steps(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model as its steps run it: compiled with ``decode=compiled``, else as it is."""
        if self.decode == "compiled" and self._compiled is None:
            # Round where the model that is not compiled does, so that tokens are the same.
            as_eager: dict[str, Any] = {"emulate_precision_casts": True}
            self._compiled = torch.compile(model, options=as_eager)
        return model if self._compiled is None else self._compiled

    def should_capture(
        self, model: PreTrainedModel, steps: int, processors: Sequence[str] = ()
    ) -> bool:
        """Whether a step is to be captured for a batch of at most `steps` steps: it is worth it, and
        possible. The model is on one GPU, no layer holds a recurrent state (which capturing would
        update), no rotary table is computed anew for every token (Dynamic NTK, on the host), no
        capture has failed, and no logits are processed by options with the names `processors`, which
        read the answer's tokens on the host: that is said once."""
        if self.decode == "eager" or steps < FIRST_STEPS + WORTH_STEPS or self.failed:
            return False
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1 or devices.pop().type != "cuda":
            return False
        change = table_change(model.config)
        changes_with_tokens = change is not None and not change.stays
        if changes_with_tokens or is_hybrid(model.config.get_text_config()):
            return False
        if processors and not self.said:
            self.said = True
            log.warning(
                "%s decodes without CUDA graphs, step by step: %s of its generation config read the "
                "tokens so far (generation_config=false turns them off)",
                type(model).__name__,
                ", ".join(processors),
            )
        return not processors

    def recall(self, key: Hashable, tensors: Sequence[Tensor]) -> Callable[[], Tensor] | None:
        """Return the captured step of an earlier batch with this key (see `capture`), or None.

        The captured step reads and writes the memory of the earlier batch's tensors. So the numbers in
        `tensors` are copied there, and `tensors` become views of that memory.
        """
        step = self.kept.get(key)
        if step is None:
            return None
        for earlier, now in zip(step.tensors, tensors, strict=True):
            earlier.copy_(now)
            now.set_(earlier)  # type: ignore[call-overload]
        return step.replay

    def capture(
        self,
        model: PreTrainedModel,
        step: Callable[[], Tensor],
        key: Hashable,
        tensors: Sequence[Tensor],
    ) -> Callable[[], Tensor] | None:
        """Capture `step`, without running it, and return a function that replays it; None if it cannot
        be captured.

        Args:
            step: uses the same tensors at every call, and returns the same tensor every time.
            key: equal for two batches if their steps differ in nothing but the numbers in `tensors`, so
                that the captured step of one can be replayed for the other; different otherwise.
            tensors: all tensors that the step reads and writes, except the model's and those whose
                addresses are in `tensors`.
        """
        graph = torch.cuda.CUDAGraph()
        device = next(model.parameters()).device
        # Without an explicit stream torch captures on a stream of the GPU that was current first. If
        # that is not the model's GPU, nothing of the step is recorded, and a replay does nothing.
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                    result = step()
            except Exception as failure:
                # The end of a failed capture raises, and torch then stays on the capture's stream.
                torch.cuda.set_stream(before)
                if is_out_of_memory(failure):
                    self.kept.clear()
                    raise
                self.failed = True
                log.warning(
                    "%s decodes without CUDA graphs: %s", type(model).__name__, first_line(failure)
                )
                return None

        def replay() -> Tensor:
            graph.replay()
            return result

        self.kept[key] = CapturedStep(replay, tensors)
        if len(self.kept) > self.most_kept:
            oldest = next(iter(self.kept))
            del self.kept[oldest]
        return replay
