"""One generated answer: how its tokens are chosen, where it ends, and what it consists of.

torch is imported where it is used, so that wrong options are refused before torch is imported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from kvbench.budget import KVError
from kvbench.engine.cost import Cost
from kvbench.errors.options import Share, check_options
from kvbench.prompts import Thought

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.engine.processors import Processing


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


@dataclass(frozen=True)
class Stopping:
    """When a generation ends.

    Attributes:
        max_new_tokens: the largest number of tokens.
        end_ids: tokens that end the generation; they are not part of the text.
        strings: stop strings, which end the generation; the text is cut before the first of them.
        decode: turns token ids into text; needed for `strings` and `is_final`.
        timeout_s: the seconds, of the prompt's own prefill and of the decoding of all prompts, after
            which a row that has not ended fails; None for no limit.
        may_be_empty: False where the first token must not end the generation.
        thought: what comes before the answer; None for nothing. `strings` and `is_final` are about the
            answer behind it.
        thought_end_ids: the tokens of `end_ids` that end the generation within a thought, too.
        processors: the options of the model's generation config by which its logits are processed before
            a token is chosen (`kvbench.engine.processors.acting_options`); empty for its own logits.
        is_final: is called with the text so far, and returns whether the score can no longer change; the
            generation then ends. Beyond 256 tokens it is called about 100 times while the answer's
            length doubles.
    """

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    timeout_s: float | None = None
    may_be_empty: bool = True
    is_final: Callable[[str], bool] | None = None
    thought: Thought | None = None
    thought_end_ids: frozenset[int] = frozenset()
    processors: Mapping[str, Any] = field(default_factory=dict)

    def mask_first(self, logits: Tensor) -> Tensor:
        """The logits [rows, vocab] of the first token, with -inf for tokens that it must not be."""
        import torch

        ids = [token for token in sorted(self.end_ids) if 0 <= token < logits.shape[-1]]
        if self.may_be_empty or not ids:
            return logits
        ends = torch.tensor(ids, device=logits.device)
        return logits.index_fill(-1, ends, float("-inf"))

    def cut(self, text: str) -> str:
        """Cut `text` before the first stop string."""
        places = [text.find(stop) for stop in self.strings]
        found_at = [place for place in places if place >= 0]
        return text[: min(found_at)] if found_at else text

    def answer_from(self, tokens: Sequence[int]) -> int | None:
        """See `Thought.answer_from`; 0 without a thought."""
        if self.thought is None or self.decode is None:
            return 0
        return self.thought.answer_from(tokens, self.decode)

    def reached(self, tokens: Sequence[int], answer_from: int | None = 0) -> bool:
        """Whether a generation that produced `tokens` is over.

        Args:
            answer_from: see `answer_from`.
        """
        ends = self.thought_end_ids if answer_from is None else self.end_ids
        if len(tokens) >= self.max_new_tokens or (tokens and tokens[-1] in ends):
            return True
        answer = [] if answer_from is None else tokens[answer_from:]
        decode = self.decode
        if decode is None or not answer:
            return False

        def text(ids: Sequence[int]) -> str:
            """The text of the answer, or of its last tokens."""
            # White space between a thought and the answer belongs to neither.
            after_thought = answer_from and len(ids) == len(answer)
            return decode(list(ids)).lstrip() if after_thought else decode(list(ids))

        if self.strings:
            # A stop string of c characters spans at most c tokens of a character each. The eight more
            # cover a character at its edge that consists of several tokens.
            tail = text(answer[-(max(map(len, self.strings)) + 8) :])
            if any(stop in tail for stop in self.strings):
                return True
        # To decode the whole text at every token would take time quadratic in the answer's length.
        due = len(answer) <= 256 or len(answer) % (len(answer) // 128) == 0
        return self.is_final is not None and due and self.is_final(text(answer))


class NonFiniteLogits(ArithmeticError):
    """The model's logits are NaN or infinite, so that no token can be chosen."""

    def __init__(self, token: int) -> None:
        super().__init__(f"non-finite logits at new token {token}")


@dataclass
class Answer:
    """The tokens that a row gives to one question, and what they cost.

    Attributes:
        uniforms: [tokens] in [0, 1), the random number by which each token is drawn; None where the most
            likely token is taken.
        before: the token ids before the answer, of the prompt and of earlier turns, evicted or not; read
            by the processors of `stopping` alone.
        begin_s: the time by `time.perf_counter` from which `Stopping.timeout_s` counts.
        chosen: the tokens so far, the ending token included.
        begins: how many of them come before the answer itself; None within a thought.
        ended: whether `stopping` was reached.
        decode_s: see `Cost`.
        failure: the exception that stopped the row; None if it succeeded.
        cost: what the answer and its prompt cost; there once the answer is over.
    """

    stopping: Stopping
    sampling: Sampling = GREEDY
    uniforms: Tensor | None = None
    before: Sequence[int] = ()
    begin_s: float = 0.0
    chosen: list[int] = field(default_factory=list)
    begins: int | None = None
    ended: bool = False
    decode_s: float = 0.0
    failure: Exception | None = None
    cost: Cost = field(default_factory=lambda: Cost(prompt_tokens=0, capacity=0, exact_bytes=0))

    @property
    def tokens(self) -> list[int]:
        """The tokens so far, without the ending token."""
        has_end = bool(self.chosen) and self.chosen[-1] in self.stopping.end_ids
        return self.chosen[:-1] if has_end else list(self.chosen)

    @cached_property
    def _processing(self) -> Processing:
        from kvbench.engine.processors import Processing

        stopping = self.stopping
        ends = sorted(stopping.end_ids)
        return Processing(stopping.processors, self.before, stopping.max_new_tokens, ends)

    def process(self, logits: Tensor) -> Tensor:
        """The logits [1, vocab] by which the next token is chosen."""
        if not self.chosen:
            logits = self.stopping.mask_first(logits)
        return self._processing(logits, self.chosen) if self.stopping.processors else logits

    @property
    def draw(self) -> float:
        """The random number by which the next token is drawn; 0 where it is not drawn."""
        if self.uniforms is None or len(self.chosen) >= len(self.uniforms):
            return 0.0
        return float(self.uniforms[len(self.chosen)])

    @property
    def steps_left(self) -> int:
        """The largest number of tokens that will still be fed to the row."""
        return self.stopping.max_new_tokens - len(self.chosen) + 1

    def take(self, token: int) -> None:
        """Add a token."""
        self.chosen.append(token)
        if self.begins is None:
            self.begins = self.stopping.answer_from(self.chosen)
        self.ended = self.stopping.reached(self.chosen, self.begins)
