"""A run's name covers what differs from the defaults; runs named in the older way are taken up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.jobs import make_job, records_of

from kvbench.records.store import config_hash
from kvbench.run import identity
from kvbench.run.identity import as_before, folder_of, without_defaults
from kvbench.run.runner import run_job


@dataclass(frozen=True)
class Before:
    size: int
    rate: float = 0.5


@dataclass(frozen=True)
class After(Before):
    shapes: tuple[int, ...] = (1, 2)


def lean(kind: type, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setattr(identity, "_class_named", lambda name: kind)
    named = {"model": {"name": "m", "path": "p"}, "task": {"_target_": "t"}, "seed": 0}
    return config_hash(without_defaults({**named, "method": {"_target_": "m", **options}}))


def test_an_option_that_is_added_with_its_default_changes_no_name(monkeypatch: Any) -> None:
    before = lean(Before, monkeypatch, size=3, rate=0.5)
    assert lean(Before, monkeypatch, size=3) == before
    assert lean(After, monkeypatch, size=3, rate=0.5, shapes=[1, 2]) == before
    assert lean(After, monkeypatch, size=3, shapes=[2, 1]) != before
    assert lean(Before, monkeypatch, size=4) != before
    assert lean(Before, monkeypatch, size=3, rate=0.25) != before


def test_records_under_the_older_name_are_taken_up(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (label, *_) = job.methods
    names = (job.experiment, job.spec.name, job.task, label)
    before = records_of(run_job(job))[label]
    new = job.folder(label)
    old = new.with_name(f"{label}-{config_hash(as_before(job.identity(label)))}")
    assert new != old
    new.rename(old)
    again = make_job(tmp_path)
    assert again.folder(label) == folder_of(tmp_path, names, again.identity(label)) == old
    result = run_job(again)
    assert records_of(result)[label] == before
    assert not new.exists()
