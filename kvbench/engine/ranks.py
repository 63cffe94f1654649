"""The processes that share one model by tensor parallelism, seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from transformers import PreTrainedModel

from kvbench.engine.faults import NonFiniteLogits
from kvbench.errors import one_line
from kvbench.kv import BudgetExceeded


class RankFailure(RuntimeError):
    """The failure of a fork on some rank, in the one line with which it fails on all ranks."""


class _Reason(NamedTuple):
    """Why a fork failed on one rank.

    Attributes:
        line: the failure in one line.
        follows: True where NaN from another rank caused this failure (`ForkBatch.attend_rows`).
    """

    line: str
    follows: bool


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model. Each has some of the KV heads of every layer, and forks for
    these heads.

    Attributes:
        count: 1 where one process has the whole model.
    """

    count: int = 1

    @classmethod
    def of(cls, model: PreTrainedModel) -> Ranks:
        """The processes among which transformers has divided the model."""
        return cls(getattr(model, "tp_size", None) or 1)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order. Waits for the others, which must all call this."""
        if self.count == 1 or not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def name_of_draws(self, example_id: str) -> str:
        """The name that seeds the draws for a prompt on this rank. It differs between ranks, so that
        their heads get different draws."""
        return example_id if self.count == 1 else f"{example_id}\0rank {dist.get_rank()}"

    def agree_on(self, failure: Exception | None) -> Exception | None:
        """Let a fork fail on all ranks if it failed on one, since the ranks take every step together.
        Waits for the other ranks, which must all call this.

        Args:
            failure: the fork's failure on this rank, or None.

        Returns:
            the failure with which the fork fails on this rank; None where it failed on no rank. Of
            several failures it is the first that was not caused by another rank's. A `BudgetExceeded`
            of this rank is returned unchanged, since the record's status depends on it.
        """
        if self.count == 1:
            return failure
        own = None
        if isinstance(failure, RankFailure):
            own = _Reason(str(failure), follows=False)
        elif failure is not None:
            own = _Reason(one_line(failure), follows=isinstance(failure, NonFiniteLogits))
        reasons = [reason for reason in self.gather(own) if reason is not None]
        if not reasons or isinstance(failure, BudgetExceeded):
            return failure
        causes = [reason for reason in reasons if not reason.follows]
        return RankFailure((causes or reasons)[0].line)
