"""The choice of the next token: the most probable one, or one drawn at random.

torch is imported where it is used, so that wrong options are refused before torch is imported.
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
    """How tokens are chosen.

    A token is drawn by a random number that depends on the seed, the example, the number of the sample
    and the number of the token, but not on the method or on the batch. Methods of nearly equal logits
    therefore draw mostly the same answers, which makes the difference of their scores precise.

    Attributes:
        temperature: the number by which the logits are divided; 0 takes the most probable token
            (greedy).
        top_p: tokens are drawn from the most probable ones up to the one with which their probability
            reaches this number (Holtzman et al., "The Curious Case of Neural Text Degeneration", section
            3.1).
        samples: the number of answers per question; each is a record of its own. Their mean score is
            pass@1 (Chen et al., "Evaluating Large Language Models Trained on Code", section 2.1, with
            k = 1).

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
        """Whether the most probable token is taken and nothing is drawn."""
        return self.temperature == 0

    def uniforms(self, seed: int, name: str, sample: int, count: int) -> Tensor | None:
        """Draw the random numbers of an answer of up to `count` tokens, uniform in [0, 1): [count]
        float32 on the CPU; None for greedy answers.

        The first numbers do not depend on `count`.

        Args:
            name: the question, and `sample`, the number of the sample.
        """
        import torch

        if self.greedy:
            return None
        digest = hashlib.sha256(f"{seed}\0{name}\0{sample}\0tokens".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.rand(count, generator=generator)

    def pick(self, logits: Tensor, uniforms: Tensor | None) -> Tensor:
        """Choose the next token of each row.

        Args:
            logits: [rows, vocab].
            uniforms: [rows] in [0, 1), on the logits' device; None to take the most probable token.

        Returns:
            [2, rows] int64, on the logits' device: the token of each row, and 1 where the row's logits
            are sound or 0 where they contain NaN or +inf. (-inf is the logit of a token that the model
            rules out.) Both are in one tensor, so that one transfer reads them.
        """
        import torch

        # NaN and +inf are the maximum of any row that contains them, so only the maximum is checked.
        largest, tokens = logits.max(-1)
        sound = torch.isfinite(largest)
        if uniforms is None:
            return torch.stack([tokens, sound.long()])
        scaled = logits.float().masked_fill(~sound[:, None], 0.0)
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / self.temperature
        # Tokens are in the order of falling probability, so that the same random number gives the same
        # token to two methods of slightly different logits. The sums are in float64, since those of a
        # large vocabulary would be rounded too much in float32.
        probabilities, order = (
            scaled.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
        )
        sum_before = probabilities.cumsum(-1) - probabilities
        nucleus = probabilities.masked_fill(sum_before >= self.top_p, 0.0)
        cumulative = nucleus.cumsum(-1)
        target = uniforms[:, None].double() * cumulative[:, -1:]
        places = torch.searchsorted(cumulative, target, right=True)
        # By rounding, the target may reach the total, beyond the last token of the nucleus.
        places = places.minimum((nucleus > 0).sum(-1, keepdim=True) - 1)
        return torch.stack([order.gather(-1, places)[:, 0], sound.long()])


GREEDY = Sampling()
