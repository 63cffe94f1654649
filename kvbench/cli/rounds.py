"""``limit=auto``: runs a job in rounds, each of twice as many examples as the one before, until the best
method of each rate is told apart from all others, or the examples end.

The sizes of the rounds are planned before the first (`planned`) and stand in the manifest. Scores are
looked at after every round, so each interval and each mark is at the level 1 - .05 / rounds, here and in
every table of these runs (`kvbench.report.stats`): by Bonferroni's inequality all of them hold at
whichever round the job stops (repeated confidence intervals, Jennison and Turnbull, 1989).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.errors import UserError, complain
from kvbench.records.read import load_run
from kvbench.run.runner import Job, JobResult

FEWEST_OF_A_ROUND = 20
"""The first round has at least this many contexts: below ten prompts nothing is tested, and with a few
more nothing is told apart at a level that is divided by the rounds."""


@dataclass(frozen=True)
class Standing:
    """The ranking of the compressed methods of one rate.

    Attributes:
        best: the method with the best mean.
        left: the methods that are not told apart from it, and how many prompts would tell, if each
            difference is what it is now (infinite where there is none).
    """

    rate: float | None
    best: str
    left: Mapping[str, float]

    def __str__(self) -> str:
        where = "" if self.rate is None else f"at rate {self.rate:g} "
        if not self.left:
            return f"{where}{self.best} is best, told apart from all others"
        return f"{where}{self.best} is best, not told apart: {', '.join(self.left)}"

    @property
    def would_tell(self) -> str:
        """How many prompts would tell the closest method apart."""
        most = max(self.left.values())
        return f"about {most:.0f} prompts would tell" if math.isfinite(most) else "equal so far"


def planned(contexts: int) -> list[int]:
    """The number of contexts after each round: all of them after the last, and half as many after the
    one before, down to `FEWEST_OF_A_ROUND`."""
    sizes = [contexts]
    while sizes[0] >= 2 * FEWEST_OF_A_ROUND:
        sizes.insert(0, math.ceil(sizes[0] / 2))
    return sizes


def run_in_rounds(job: Job, run: Callable[[Job], JobResult]) -> JobResult:
    """Run the rounds of a job, and say after each what is told apart.

    Args:
        run: runs one round, whose job has the limit of that round.
    """
    ranked_together = Counter(
        str(job.budget_configs[label]) if method.uses_budget else ""
        for label, (method, _) in job.methods.items()
        if method.saves_memory or method.quantize
    )
    if max(ranked_together.values(), default=0) < 2:
        raise UserError(
            f"limit is 'auto' and the methods are {', '.join(job.methods)}; allowed: two or more that "
            "compress at one rate, of which the best is to be told apart, or a number"
        )
    sizes = planned(job.size)
    for number, size in enumerate(sizes, 1):
        result = run(job.within(size, rounds=sizes))
        job = replace(job, retry_failed=False)  # what failed in this command is not run again
        ranked = standings(list(result.folders.values()))
        title = f"limit=auto, round {number} of {len(sizes)}, {size} of {sizes[-1]} examples"
        for standing in ranked:
            more = f" ({standing.would_tell})" if standing.left and size == sizes[-1] else ""
            complain(f"{title}: {standing}{more}")
        if not any(standing.left for standing in ranked):
            break
    return result


def standings(folders: Sequence[Path]) -> list[Standing]:
    """What the scores of these runs, those of the latest command, tell of each rate, the largest first.
    The modules that rank them are imported here, since importing them takes as long as a small job."""
    from kvbench.report.experiment import group_runs
    from kvbench.report.frame import compared_strata, comparisons
    from kvbench.report.marks import standing
    from kvbench.report.ratios import measures_several_rates
    from kvbench.report.stats import prompts_to_tell

    runs = [load_run(folder) for folder in folders]
    runs = [
        replace(run, records=run.records[run.records["example_id"].isin(run.asked or ())])
        for run in runs
    ]
    (group,) = group_runs(runs)
    strata, tests = compared_strata(group), comparisons(group)
    found = []
    for peers in (peers for peers in group.peers if len(peers) > 1):
        marks = standing(strata, peers, tests, lower=group.meta.lower_is_better)
        first = next((i for i in peers if marks.get(i) == "best"), peers[0])
        left = [i for i in peers if i != first and marks.get(i) not in ("worse", "better")]
        names = [group.names[group.labels[i]] for i in (first, *left)]
        prompts = [
            prompts_to_tell(tests.get((first, i)) or tests[i, first], strata, of=len(peers))
            for i in left
        ]
        # A probe ranks means over the rates that it measures, whatever the budget's is.
        rate = None if measures_several_rates(group) else group.variants[first].rate
        found.append(Standing(rate, names[0], dict(zip(names[1:], prompts, strict=True))))
    return sorted(found, key=lambda standing: -(standing.rate or 0.0))
