"""What tests read of the report's frames and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import rich.console

from kvbench.report.frame import scores, totals
from kvbench.report.render import terminal
from kvbench.report.runs import Group, load_experiment
from kvbench.report.table import Table


def group_of(folder: Path, task: str | None = None) -> Group:
    """The group of a task of the experiment in a folder, or its only one."""
    groups = load_experiment(folder).groups
    (found,) = [group for group in groups if task in (None, group.task)]
    return found


def totals_of(group: Group, measure: str = "score") -> pd.DataFrame:
    return totals(scores(group), measure).drop(columns="variant")


def shown(table: Table) -> list[list[str]]:
    return [
        [table.cell(row, c).text for c in table.columns]
        for _, rows in table.groups()
        for row in rows
    ]


def heads(table: Table) -> list[str]:
    return [column.name for column in table.columns]


def data(table: Table | None) -> pd.DataFrame:
    assert table is not None
    found: Any = table.data
    assert found is not None
    return found


def printed(*tables: Table, width: int = 80) -> list[str]:
    """Lines of a terminal of this width."""
    console = rich.console.Console(width=width, color_system=None)
    with console.capture() as captured:
        terminal(tables, console)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip(" ─")]
