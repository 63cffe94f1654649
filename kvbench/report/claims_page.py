"""The page of the claims that ``scripts/claims.py`` decided: each with its verdict, then comparisons.

In: claims.csv of a folder, a row for each comparison. Out: report.html in that folder.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvbench.report.page import PAGE, html
from kvbench.report.render import PAGE_MARK, write_text
from kvbench.report.table import Column, Table, score_format, whole, with_values

CLAIMS = "claims.csv"
SUBTITLE = (
    "A claim is tested in several cells (layers, rates or measures). It holds if the 95 % interval of"
    " every cell lies on the claimed side; it holds on average if only the interval of the mean over"
    " cells does; it fails if that interval lies on the other side. Otherwise it cannot be told."
)


def write_claims_page(folder: Path) -> Path:
    rows = pd.read_csv(folder / CLAIMS)
    models = ", ".join(rows["model"].dropna().unique()) if "model" in rows else ""
    deciding = rows[rows["decides"].astype(bool)]
    deciding = deciding.assign(claim=deciding["claim"] + " (" + deciding["place"] + ")")
    verdicts = (
        Column("id"),
        Column("verdict"),
        Column("claim"),
        Column("comparison", "decided by"),
        Column("difference", text=score_format("")),
        Column("claimed"),
        Column("units", text=whole),
        Column("more", "prompts needed to tell", whole),
        Column("measure", "as stated, or ours"),
    )
    every = rows.assign(group=rows["id"] + ": " + rows["claim"])
    comparisons = (
        Column("comparison"),
        Column("result"),
        Column("difference", text=score_format("")),
        Column("claimed"),
        Column("units", text=whole),
        Column("held", "cells that hold", whole),
        Column("cells", text=whole),
        Column("protocol"),
    )
    page = html(
        "tables.html.j2",
        title=f"Claims of the papers on {models}" if models else "Claims of the papers",
        subtitle=SUBTITLE,
        tables=[
            Table("claims", "Verdicts", deciding, with_values(deciding, verdicts)),
            Table("comparisons", "Every comparison", every, with_values(every, comparisons)),
        ],
    )
    return write_text(folder / PAGE, page, PAGE_MARK)
