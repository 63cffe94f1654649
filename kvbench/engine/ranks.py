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
    """The failure of a fork on any rank, as the one line that all ranks raise."""


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
    """The processes that share a model. Each has some of the KV heads, and forks of its own for them.

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
        """What seeds the draws for a prompt on this rank: no two ranks' heads get the same draws."""
        return example_id if self.count == 1 else f"{example_id}\0rank {dist.get_rank()}"

    def agree_on(self, failure: Exception | None) -> Exception | None:
        """The failure of a fork on any rank, the same on all of them, since ranks take every step
        together; None where it failed on none. Waits for the others, which must all call this.

        Of several failures the first that no other rank caused is returned. A `BudgetExceeded` is
        returned as it is, since the record's status depends on it.
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
