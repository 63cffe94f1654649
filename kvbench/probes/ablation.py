"""Ablations of one method: variants against a reference, paired on the same draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvbench.errors import nearest
from kvbench.kv import KVError
from kvbench.probes.layer_error import METRICS, LayerError
from kvbench.run.plan import Methods, Unit
from kvbench.run.session import Session


@dataclass(frozen=True, kw_only=True)
class Ablation(LayerError):
    """`LayerError` whose report sets every variant against one of them.

    The variants are methods of the job: one class under several labels. Prompts, draws and layers
    are the same for all, so that differences are paired. At gamma = 4 most signs are forced, so
    draws on one prompt hardly differ: many prompts tell more than many draws.

    Attributes:
        reference: the label that others are compared with.
        parts: what was changed, each with the labels of its variants in the order shown; every label
            but the reference's belongs to one at most.
        series: "layer" sets layers apart in the report; null takes layers as repetitions (synthetic
            layers are draws of one kind of data).
        grid: label of every (block size) shown in the table of error and seconds by rate, as in
            Figure 3 of BalanceKV: {block size: label}. Its errors are the released notebook's.
    """

    name: ClassVar[str] = "ablation"
    measures: ClassVar[tuple[str, ...]] = ()

    reference: str = "balancekv"
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    grid: Mapping[int, str] = field(default_factory=dict)
    series: str | None = "layer"

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`; effects are shown by the score's metric and by the others."""
        fields = [METRICS[name][0] for name in dict.fromkeys((self.metric, "per_query", "pooled"))]
        figure = {
            "kind": "ablation",
            "y": fields[0],
            "also": fields[1:],
            "by": "rate",
            "series": self.series,
            "unit": "prompt" if self.series else "layer",
            "reference": self.reference,
            "parts": {part: list(labels) for part, labels in self.parts.items()},
            "grid": {str(size): label for size, label in self.grid.items()},
            "grid_y": METRICS["released"][0],
            "grid_note": self._beside_figure3(),
        }
        return {**super().meta(), "figures": [figure]}

    def _beside_figure3(self) -> str:
        """What is alike and what differs between Figure 3 of BalanceKV and the numbers beside it."""
        ends = "too" if self.exact == 256 else f"here {self.exact}"
        drawn = f"{self.seeds} here" + (f", on {self.num_prompts} prompts" if self.prompts else "")
        of = "tensors drawn at random"
        if self.prompts is not None:
            of = f"the model and the layers named here, prompts of {self.prompts.name}"
        return (
            "Errors of both are the released notebook's: per query, elements of the exact output below "
            "1e-8 (the negative ones too) count as 1e-8 in the denominator, about 1.4 times what "
            f"relative_error is. There 256 tokens are exact at both ends ({ends}), gamma is 4 and the "
            "temperature 0.1 (see the options of the variants for ours). Published: "
            "Llama-3.1-8B-Instruct in bfloat16, TriviaQA of LongBench-E, 10 seeds "
            f"({drawn}), another machine; ours: {of}."
        )

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """See `LayerError.units`.

        Raises:
            KVError: a label that is not among the methods.
        """
        named = [self.reference, *self.grid.values()]
        named += [label for labels in self.parts.values() for label in labels]
        for label in named:
            if label not in methods:
                raise KVError(
                    f"the ablation names {label!r}{nearest(label, list(methods))}, which is not among "
                    f"the methods; allowed: {', '.join(methods)}"
                )
        return super().units(session, methods)
