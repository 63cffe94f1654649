"""A report of an experiment in Weights & Biases: ``python -m kvbench.report.wandb_report <folder>``.

It has the published numbers beside ours, the first table of each model and task, the charts of the
experiment's own run, and how to reproduce it. It is written to ``<folder>/wandb/report.json``, and
published where an API key is set.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.records.store import replace_file
from kvbench.report.wandb import OVERVIEW, log_runs

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as wr

    from kvbench.report.runs import Experiment

SEND_S = 600.0
"""Seconds that sending for a report may take."""


def build_wandb_report(experiment: Experiment, project: str, entity: str = "") -> wr.Report:
    """The report, not yet published."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces import expr

    from kvbench.errors import complain
    from kvbench.report.page import how_to_reproduce
    from kvbench.report.papers import PaperError
    from kvbench.report.published import beside, published_tables
    from kvbench.report.render import markdown
    from kvbench.report.tables import tables_of

    tables = []
    try:
        tables += published_tables(beside(experiment))
    except PaperError as error:
        complain(f"warning: {error}", "wandb")
    for group in experiment.groups:
        tables += [table for table in tables_of(group) if table.columns][:1]
    blocks: list[Any] = [wr.TableOfContents(), wr.H1("Scores")]
    blocks += [wr.MarkdownBlock(text=markdown(table)) for table in tables]
    of = expr.Config("experiment") == str(experiment.runs[0].manifest["experiment"])
    whole = wr.Runset(name=OVERVIEW, filters=expr.And(of, expr.Config("kind") == OVERVIEW))
    panels: list[Any] = [wr.MediaBrowser(), wr.WeavePanelSummaryTable(table_name="task_by_method")]
    blocks += [wr.H1("All methods side by side"), wr.PanelGrid(runsets=[whole], panels=panels)]
    blocks.append(wr.H1("How to reproduce"))
    for what, lines in how_to_reproduce(experiment):
        blocks += [wr.H3(what), wr.CodeBlock(code="\n".join(lines), language=None)]
    title = f"kvbench: {experiment.name}"[:128]
    return wr.Report(project=project, entity=entity, title=title, blocks=blocks, width="fluid")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 records that cannot be read, or a server that took nothing."""
    from kvbench.report.__main__ import in_a_line
    from kvbench.report.runs import load_experiment

    parser = argparse.ArgumentParser(
        prog="python -m kvbench.report.wandb_report", description=__doc__
    )
    parser.add_argument("folders", nargs="+", metavar="folder", help="<results>/<experiment>")
    parser.add_argument("--project", default="kvbench", help="W&B project (default: kvbench)")
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY", ""), help="its owner")
    known = bool(os.environ.get("WANDB_API_KEY"))
    send_it: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": known}
    parser.add_argument("--send", **send_it, help="publish (default: if WANDB_API_KEY is set)")
    options = parser.parse_args(arguments)

    def work() -> None:
        for folder in map(Path, options.folders):
            experiment = load_experiment(folder)
            report = build_wandb_report(experiment, options.project, options.entity)
            (folder / "wandb").mkdir(parents=True, exist_ok=True)
            text = report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
            replace_file(folder / "wandb" / "report.json", text.encode())
            print(f"{folder / 'wandb' / 'report.json'}: built")
            if options.send:
                where = {"project": options.project, "entity": options.entity or None}
                log_runs(experiment.runs, **where, mode="online", timeout_s=SEND_S)
                report.save()
                print(f"report: {report.url}")

    return in_a_line(work, options.folders, "wandb")


if __name__ == "__main__":
    sys.exit(main())
