"""A trial of a W&B sweep: ``python -m kvbench.cli.wandb_sweep key=value ...``, which `wandb agent` runs.

Takes what ``kvbench`` takes. The trial's W&B run gets ``score``, ``ratio`` and those of each method. See
scripts/wandb_sweep.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvbench.cli.jobs import FAILED, JobOutcome
from kvbench.cli.main import main as kvbench
from kvbench.errors import redact


def main(argv: Sequence[str] | None = None) -> None:
    """Run the jobs of these overrides, log what they came to, and exit with their status."""
    import wandb

    arguments = list(sys.argv[1:] if argv is None else argv)
    outcomes: list[JobOutcome] = []
    status = FAILED
    run = wandb.init(job_type="trial", config={"overrides": redact(arguments)})
    try:
        kvbench(arguments, outcomes)
    except SystemExit as done:
        from kvbench.report.objective import objective_of

        status = done.code if isinstance(done.code, int) else FAILED
        folders = [folder for outcome in outcomes for folder in outcome.runs]
        if folders:
            run.log(objective_of(folders))
    finally:
        run.finish(exit_code=status)
    sys.exit(status)


if __name__ == "__main__":
    main()
