"""``python -m kvbench.report.wandb.report <results>/<experiment>``: a W&B report of an experiment.

The report is built from the records alone, without a network, and written as JSON. With an API key
(or ``--send``) the experiment's runs are then logged, sent, and the report published; publishing again
updates it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import needs_extra
from kvbench.records.durable import read_file
from kvbench.records.read import StoreError
from kvbench.report.experiment import Experiment, Group, load_experiment
from kvbench.report.figures.style import style_of
from kvbench.report.files import part_of, write_text
from kvbench.report.render.page import how_to_reproduce
from kvbench.report.render.text import markdown
from kvbench.report.sections import tables_of
from kvbench.report.table import unit_text
from kvbench.report.tables.published import PaperError, published_tables
from kvbench.report.tables.published_rows import comparison_tables
from kvbench.report.wandb.log import COMPARISON, comparison_id, log_runs, run_id
from kvbench.report.wandb.media import curves, field_tables
from kvbench.report.wandb.send import NotSent, probe

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as wr

SPEC = "report.json"
PUBLISHED = "report-published.json"
SEND_S = 600.0
"""Seconds that sending an experiment's runs may take."""

_WIDE, _HALF, _LOW, _HIGH = 24, 12, 8, 14  # panel sizes; a report is 24 units wide


def build_wandb_report(experiment: Experiment, project: str, entity: str = "") -> wr.Report:
    """The report, not yet published: published numbers beside ours; for each model and task its table
    and panels (score against ratio, scores, heatmaps, curves, time) with one run set per method; all
    methods side by side; how to reproduce it.

    Args:
        entity: whose project it is; may be filled in later.
    """
    import wandb_workspaces.reports.v2 as wr

    blocks: list[Any] = [wr.TableOfContents()]
    blocks += _beside_the_papers(experiment)
    for group in experiment.groups:
        blocks += [wr.H1(f"{group.task} on {group.model}"), *_tables(experiment, group)]
        blocks.append(wr.PanelGrid(runsets=_run_sets(experiment, group), panels=_panels(group)))
        if len(group.variants) > 1:
            blocks.append(wr.H2(f"{group.task} on {group.model}: all methods side by side"))
            blocks.append(_side_by_side(experiment, group))
    blocks.append(wr.H1("How to reproduce"))
    for what, lines in how_to_reproduce(experiment):
        blocks.append(wr.H3(what))
        blocks.append(wr.CodeBlock(code="\n".join(lines), language=None))
    return wr.Report(
        project=project,
        entity=entity,
        title=f"kvbench: {experiment.name}"[:128],
        description="KV-cache compression methods on one honest footing: one exact prefill for all,"
        " measured ratios, 95 % intervals.",
        blocks=blocks,
        width="fluid",
    )


def spec_of(report: wr.Report) -> dict[str, Any]:
    """What the server would be given, as plain JSON."""
    model = report._to_model()
    return {
        "displayName": model.display_name,
        "description": model.description,
        "spec": json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }


def publish(report: wr.Report, memory: Path) -> str:
    """Save the report on the server; returns its address.

    Args:
        memory: a file that remembers what was published where, so that it is updated next time.

    Raises:
        NotSent: the server did not take it.
    """
    import wandb

    base = wandb.setup().settings.base_url
    probe(base)
    try:
        report.entity = report.entity or str(wandb.Api().default_entity)
        place = {"server": base, "entity": report.entity, "project": report.project}
        known = json.loads(read_file(memory)) if memory.exists() else {}
        if {key: known.get(key) for key in place} == place:
            report.id = known["id"]
        report.save()
    except Exception as error:
        raise NotSent(str(error).strip().splitlines()[0] if str(error) else repr(error)) from error
    write_text(memory, json.dumps(place | {"id": report.id, "url": report.url}, indent=1) + "\n")
    return str(report.url)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 records that cannot be read, or a server that took nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.report.wandb.report", description=__doc__
    )
    parser.add_argument("folders", nargs="+", metavar="folder", help="<results>/<experiment>")
    parser.add_argument("--project", default="kvbench", help="W&B project (default: kvbench)")
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY", ""), help="its owner")
    parser.add_argument(
        "--send",
        action=argparse.BooleanOptionalAction,
        default=bool(os.environ.get("WANDB_API_KEY")),
        help="log the runs and publish (default: if WANDB_API_KEY is set)",
    )
    options = parser.parse_args(arguments)
    status = 0
    for folder in options.folders:
        try:
            _one(Path(folder), options.project, options.entity, options.send)
        except (StoreError, NotSent, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "wandb_workspaces":
                raise
            print(f"error: {needs_extra('wandb-workspaces', 'wandb-report')}", file=sys.stderr)
            status = 1
    return status


def _one(folder: Path, project: str, entity: str, send: bool) -> None:
    experiment = load_experiment(folder)
    report = build_wandb_report(experiment, project, entity)
    place = part_of(folder, "wandb")
    written = write_text(place / SPEC, json.dumps(spec_of(report), indent=1) + "\n")
    if not send:
        print(f"{written}: built, not published; set WANDB_API_KEY (or `wandb login` and --send)")
        return
    log_runs(
        experiment.runs, project=project, entity=entity or None, mode="online", timeout_s=SEND_S
    )
    print(f"report: {publish(report, place / PUBLISHED)}")


def _beside_the_papers(experiment: Experiment) -> list[Any]:
    """The published tables beside ours, where the experiment names any."""
    import wandb_workspaces.reports.v2 as wr

    try:
        tables = comparison_tables(published_tables(experiment))
    except PaperError as error:
        return [wr.P(f"Published numbers are left out: {error}")]
    blocks: list[Any] = [wr.MarkdownBlock(text=markdown(table)) for table in tables]
    return [wr.H1("Published numbers beside ours"), *blocks] if blocks else []


def _tables(experiment: Experiment, group: Group) -> list[Any]:
    """The tables of one group, as after a job."""
    import wandb_workspaces.reports.v2 as wr

    alone = replace(experiment, groups=(group,))
    return [wr.MarkdownBlock(text=markdown(table)) for table in tables_of(alone)]


def _run_sets(experiment: Experiment, group: Group) -> list[wr.Runset]:
    """One run set per method, each in the method's colour."""
    import wandb_workspaces.reports.v2 as wr

    methods = list(dict.fromkeys(variant.method for variant in group.variants))
    sets = []
    for method in methods:
        mine = [m for m in group.manifests if m.get("method") == method]
        settings = wr.RunSettings(color=style_of(method).color)
        looks = dict.fromkeys(map(run_id, mine), settings)
        filters = _filters(experiment, mine, method)
        sets.append(wr.Runset(name=method, filters=filters, run_settings=looks))
    return sets


def _filters(experiment: Experiment, manifests: Sequence[Any], method: str) -> Any:
    """The W&B runs of one method on what these manifests ran on."""
    from wandb_workspaces import expr

    model, models = expr.Config("model"), sorted({str(m["model"]) for m in manifests})
    return expr.And(
        expr.Config("experiment") == str(manifests[0].get("experiment", experiment.name)),
        model == models[0] if len(models) == 1 else model.isin(models),
        expr.Config("task") == str(manifests[0]["task"]),
        expr.Config("method") == method,
    )


def _panels(group: Group) -> list[Any]:
    """Panels over the runs of one group."""
    import wandb_workspaces.reports.v2 as wr

    unit = f"score{unit_text(group.meta.score_unit)}"
    if group.meta.score_unit == "fraction":
        unit = "score (1 is all right)"
    ratio = "measured ratio (bytes held / bytes of the exact cache)"
    panels: list[Any] = []
    bars = {"score": unit}
    if group.meta.figure("throughput"):
        bars = _THROUGHPUT
    else:
        panels.append(
            wr.ScatterPlot(
                title=f"{group.task}: score against memory",
                x=wr.SummaryMetric("ratio"),
                y=wr.SummaryMetric("score"),
            )
        )
    for field, (metric, title) in _SECONDS.items():
        if group.records[field].notna().any():
            bars = {**bars, metric: title}
    panels += [wr.BarPlot(title=title, metrics=[metric]) for metric, title in bars.items()]
    tables = field_tables(group)
    found = {c.section: c for variant in group.variants for c in curves(group, tables, variant)}
    for curve in found.values():
        panels.append(
            wr.LinePlot(
                title=f"{unit} by {curve.x if curve.x != 'ratio' else ratio}",
                x=f"{curve.section}/{curve.x}",
                y=[f"{curve.section}/score"],
                title_x=ratio if curve.x == "ratio" else curve.x.replace("_", " "),
                title_y=unit,
            )
        )
    for panel in panels:
        panel.layout = wr.Layout(w=_HALF, h=_LOW)
    if group.meta.figure("heatmap"):
        for key, title in (("heatmap", "heatmaps"), ("heatmap_chart", "heatmaps, interactive")):
            panels.append(_browser(key, title=f"{title}, one per method", num_columns=4))
    return panels


def _browser(key: str, **more: Any) -> wr.MediaBrowser:
    """A panel as wide as the report, of the media logged under `key`."""
    import wandb_workspaces.reports.v2 as wr

    return wr.MediaBrowser(media_keys=[key], layout=wr.Layout(w=_WIDE, h=_HIGH), **more)


_THROUGHPUT = {
    "decode_tokens_per_s": "new tokens per second while decoding",
    "tokens_per_s": "new tokens per second, prefill and compression included",
    "peak_bytes": "peak memory (bytes)",
}
_SECONDS = {
    "prefill_s": ("prefill_s", "prefill, median seconds per example"),
    "compress_s": ("compress_s", "compression, median seconds per example"),
    "decode_s": ("decode_ms_per_token", "decoding, median milliseconds per token"),
}
"""Titles of bars by what W&B's runs are summed up with; of seconds by the record field."""


def _side_by_side(experiment: Experiment, group: Group) -> wr.PanelGrid:
    """What the comparison run of a group holds."""
    import wandb_workspaces.reports.v2 as wr

    manifest = group.manifests[-1]
    name = str(manifest.get("experiment", experiment.name))
    filters = _filters(
        experiment, [{**manifest, "task": group.task, "model": group.model}], COMPARISON
    )
    keys = ["score_against_ratio_figure"] if _sweeps(group) else []
    if "rate" in group.records and group.records["rate"].nunique() > 1:
        keys.append("error_against_memory_figure")
    keys += ["heatmaps"] if group.meta.figure("heatmap") else []
    panels: list[Any] = [_browser(key, num_columns=1) for key in keys]
    names = ["predictions"] if group.records["prediction"].notna().any() else []
    for table in ("scores", *names):
        layout = wr.Layout(w=_WIDE, h=_HIGH)
        panels.append(wr.WeavePanelSummaryTable(table_name=table, layout=layout))
    shown = {comparison_id(name, group): wr.RunSettings(color=style_of("exact").color)}
    runs = wr.Runset(name=COMPARISON, filters=filters, run_settings=shown)
    return wr.PanelGrid(runsets=[runs], panels=panels)


def _sweeps(group: Group) -> bool:
    return len({variant.rate for variant in group.variants if variant.rate is not None}) > 1


if __name__ == "__main__":
    sys.exit(main())
