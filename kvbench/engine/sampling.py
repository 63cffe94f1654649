"""Choosing the next token: the most probable one, or one drawn at random.

torch is imported where it is used, so that options that cannot be are refused without it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from kvbench.budget import KVError
from kvbench.errors.options import Share, check_options

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How answers are generated. A drawn token depends on the seed, the example, the number of the
    sample and of the token, and on its logits, but not on the method or on what else is in the batch:
    methods that differ little then draw mostly the same answers, which makes their difference precise.

    Attributes:
        temperature: the logits are divided by it; 0: the most probable token (greedy).
        top_p: draw from the most probable tokens that together have this probability (Holtzman et
            al., "The Curious Case of Neural Text Degeneration", section 3.1), the last one included.
        samples: answers per question, a record each; their mean score is pass@1 (Chen et al.,
            "Evaluating Large Language Models Trained on Code", section 2.1, with k = 1).

    Raises:
        KVError: a value that is not allowed, or several samples of a greedy answer.
    """

    temperature: Annotated[float, Ge(0), Le(100)] = 0.0
    top_p: Share = 1.0
    samples: Annotated[int, Ge(1), Le(10_000)] = 1

    def __post_init__(self) -> None:
        check_options(self, "sampling.", KVError)
        if self.greedy and self.samples > 1:
            raise KVError(
                f"sampling.samples is {self.samples} and sampling.temperature 0, which gives the same "
                "answer every time; allowed: samples 1, or a temperature above 0"
            )

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def uniforms(self, seed: int, name: str, sample: int, count: int) -> Tensor | None:
        """The uniform draws of an answer of up to `count` tokens, [count] float32 on the CPU; None where
        nothing is drawn. A longer answer begins with the draws of a shorter one."""
        import torch

        if self.greedy:
            return None
        digest = hashlib.sha256(f"{seed}\0{name}\0{sample}\0tokens".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.rand(count, generator=generator)

    def pick(self, logits: Tensor, uniforms: Tensor | None) -> Tensor:
        """The next token of each row.

        NaN and +inf are the maximum of any row they occur in, so that the maximum alone is checked; -inf
        beside a finite maximum is a token that the model rules out, and no fault.

        Args:
            logits: [rows, vocab]. uniforms: [rows] in [0, 1), on the logits' device; None: greedy.

        Returns:
            [2, rows] int64, on the device, so that one transfer reads both: the token of each row, and 1
            where its logits can be trusted, else 0.
        """
        import torch

        best, tokens = logits.max(-1)
        sound = torch.isfinite(best)
        if uniforms is None:
            return torch.stack([tokens, sound.long()])
        scaled = logits.float().masked_fill(~sound[:, None], 0.0)
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / self.temperature
        # By falling probability, so that one draw gives two methods the same token even where their
        # logits differ a little; in float64, in which the sums of a large vocabulary are exact enough.
        probabilities, order = (
            scaled.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
        )
        below = probabilities.cumsum(-1) - probabilities
        kept = probabilities.masked_fill(below >= self.top_p, 0.0)
        reached = kept.cumsum(-1)
        wanted = uniforms[:, None].double() * reached[:, -1:]
        places = torch.searchsorted(reached, wanted, right=True)
        places = places.minimum((kept > 0).sum(-1, keepdim=True) - 1)
        return torch.stack([order.gather(-1, places)[:, 0], sound.long()])


GREEDY = Sampling()
