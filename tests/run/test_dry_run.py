"""What a dry run predicts is what the run then holds; prompts beyond the model's positions are told."""

from __future__ import annotations

import io
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.command import main
from support.configs import composed
from support.jobs import Letters, make_job

from kvbench.cli.build import build_job
from kvbench.engine.estimate import cache_shape
from kvbench.kernels.quantize import Quantization, pack, packed_bytes
from kvbench.records.read import load_runs
from kvbench.report.build import build_report
from kvbench.run.preview import print_dry_run
from kvbench.run.runner import run_job
from kvbench.tasks.base import PromptEncoder


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group_size", [1, 7, 16, 64])
@pytest.mark.parametrize("shape", [(2, 64, 32), (3, 37, 20), (1, 1, 5), (2, 0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_bytes_are_those_of_packing(
    bits: int, group_size: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    quantization = Quantization(bits, group_size)
    for by_channel in (True, False):
        predicted = packed_bytes(shape, quantization, dtype.itemsize, by_channel=by_channel)
        if shape[1] == 0:
            assert predicted == 0
            continue
        packed = pack(torch.randn(shape).to(dtype), quantization, by_channel=by_channel)
        stored = [packed.codes, packed.scale, packed.zero]
        assert predicted == sum(len(part.flatten()) * part.itemsize for part in stored)


def test_a_dry_run_predicts_the_bytes_of_packed_caches(tmp_path: Path, capsys: Any) -> None:
    """Bytes of the table's cells against those that the run then measures."""
    common = [
        *("model=recall_mini", "device=cpu", "logger=none", f"results_dir={tmp_path}", "limit=1"),
        *("task.num_lines=[20]", "method=[exact,snapkv]"),
    ]
    told: dict[tuple[str, str], str] = {}
    for packed in ("null", "{bits: 4, group_size: 64}", "{bits: 2, group_size: 16}"):
        quantize = [f"methods.{name}.quantize={packed}" for name in ("exact", "snapkv")]
        status, out, _ = main(capsys, *common, *quantize, "dry_run=true")
        assert status == 0
        for name in ("exact", "snapkv"):
            (line,) = (line for line in out.splitlines() if line.strip().startswith(f"{name} "))
            told[name, packed] = re.sub(r" +", " ", line)
        assert main(capsys, *common, *quantize)[0] == 0
    measured = [
        (
            run.manifest["method"],
            run.manifest["identity"]["method"]["quantize"],
            run.records.iloc[0],
        )
        for run in load_runs(tmp_path / "default")
    ]
    assert len(measured) == 6
    for name, quantize, record in measured:
        packed = "null"
        if quantize:
            packed = f"{{bits: {quantize['bits']}, group_size: {quantize['group_size']}}}"
        size = f"{record['cache_bytes'] / 1024:.1f} KiB ({record['ratio']:.0%})"
        assert size in told[name, packed]
        assert f"{record['exact_bytes'] / 1024:.1f} KiB" in told[name, packed]
        job = build_job(composed(*common))
        shape = cache_shape(job.spec, job.session.dtype)
        assert shape is not None
        entries = int(record["entries"]["max"])
        kind = None if quantize is None else Quantization(**quantize)
        assert shape.bytes(int(record["prompt_tokens"]), entries, kind) == record["cache_bytes"]


def beyond(job: Any, positions: int | None) -> Any:
    """The job on a model that has so many positions."""
    job.session.__dict__["encoder"] = PromptEncoder(Letters(), max_positions=positions)
    return job


def test_prompts_beyond_the_models_positions_are_told_recorded_and_on_the_page(
    tmp_path: Path, caplog: Any
) -> None:
    """Of the prompts of 75 characters and more those above the limit, with both numbers."""
    plain = run_job(make_job(tmp_path / "plain"))
    lengths = [
        json.loads(line)["prompt_tokens"]
        for line in (plain.folders["exact"] / "records.jsonl").read_text().splitlines()
    ]
    limit = sorted(lengths)[1]  # so that some are at the limit and some above it
    over = [n for n in lengths if n > limit]
    assert over
    assert len(over) < len(lengths)
    with caplog.at_level(logging.WARNING):
        result = run_job(beyond(make_job(tmp_path), limit))
    told = (
        f"{len(over)} of {len(lengths)} prompts are longer than the model's positions: up to "
        f"{max(over)} tokens, and tiny has {limit};"
    )
    assert [told in record.message for record in caplog.records] == [True]
    for folder in result.folders.values():
        for line in (folder / "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            flags = (record.get("beyond_positions"), record.get("max_positions"))
            assert flags == ((True, limit) if record["prompt_tokens"] > limit else (None, None))
    build_report(tmp_path / "e")
    note = (
        f"{len(over)} prompts are longer than the model's positions (up to {max(over)} tokens, "
        f"{limit} positions)"
    )
    page = (tmp_path / "e" / "report.html").read_text().replace("&#39;", "'")
    assert page.count(note) == 1
    (table,) = (tmp_path / "e" / "tables").glob("echo-tiny.md")
    assert note in table.read_text()
    build_report(tmp_path / "plain" / "e")
    assert "positions" not in (tmp_path / "plain" / "e" / "tables" / "echo-tiny.md").read_text()


def test_nothing_is_told_where_all_prompts_fit_or_nobody_knows(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        for i, positions in enumerate((None, 10_000)):
            run_job(beyond(make_job(tmp_path / str(i)), positions))
        few = replace(make_job(tmp_path / "few"), limit=1)
        run_job(beyond(few, 75))  # the longer prompts are not of this job
    assert not caplog.records


def test_a_dry_run_tells_of_positions_too(tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), width=200)
    print_dry_run(beyond(make_job(tmp_path), 50), out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    (line,) = (line for line in text.splitlines() if line.strip().startswith("warning"))
    assert re.search(r"4 of 4 prompts .* up to \d+ tokens, and tiny has 50;", line)
    assert list(tmp_path.iterdir()) == []
