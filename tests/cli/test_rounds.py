"""``limit=auto``: rounds until the best method is told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.jobs import make_job

from kvbench.cli.rounds import planned, run_in_rounds, standings
from kvbench.errors import UserError
from kvbench.methods import build_method
from kvbench.records.read import load_run
from kvbench.report.build import tables_to_print
from kvbench.report.experiment import load_experiment
from kvbench.run.plan import Fields, Methods, Plan, Unit
from kvbench.run.runner import run_job
from kvbench.run.session import Session

ALL = "0123456789"


@dataclass(frozen=True)
class Wins(Plan):
    """A plan of `size` units. Of ten, each method wins those whose digits `wins` has, exact all."""

    wins: dict[str, str]
    size: int = 90
    rates: tuple[float, ...] = ()

    def meta(self) -> dict[str, Any]:
        return {"version": 1, "subject": "numbers"}

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        return [Unit(f"u{i}", (f"u{i}",), i) for i in range(self.size)]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Fields]:
        for label in methods:
            won = str(unit.payload % 10) in self.wins.get(label, ALL)
            record = {"method": label, "example_id": unit.id, "score": float(won)}
            yield record | ({"rate": self.rates[unit.payload % 2]} if self.rates else {})


def test_a_round_has_half_of_the_next_and_at_least_twenty() -> None:
    assert planned(200) == [25, 50, 100, 200]
    assert planned(45) == [23, 45]
    assert planned(39) == [39]
    assert planned(4) == [4]


@pytest.mark.parametrize(
    ("wins", "rounds", "last"),
    [
        ({"snapkv": ALL, "uniform": ""}, 1, "snapkv is best, told apart from all others"),
        ({"snapkv": ALL, "uniform": "0123456"}, 2, "snapkv is best, told apart from all others"),
        ({"snapkv": ALL, "uniform": "123456789"}, 3, "snapkv is best, told apart from all others"),
        (
            {"snapkv": "01234567", "uniform": "3456789", "h2o": ""},
            3,
            "snapkv is best, not told apart: uniform (about 283 prompts would tell)",
        ),
        ({"snapkv": ALL, "uniform": ALL}, 3, "is best, not told apart: snapkv (equal so far)"),
    ],
)
def test_rounds_end_where_the_best_is_told_apart(
    tmp_path: Path, capsys: Any, wins: dict[str, str], rounds: int, last: str
) -> None:
    methods = {name: build_method(name) for name in ("exact", *wins)}
    job = make_job(tmp_path, methods, plan=Wins(wins, 92))
    sizes = planned(92)[:rounds]
    assert len(planned(92)) == 3
    result = run_in_rounds(job, run_job)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == rounds
    assert f"round {rounds} of 3, {sizes[-1]} of 92 examples: at rate 0.25 " in lines[-1]
    assert last in lines[-1]
    run = load_run(result.folders["snapkv"])
    assert (len(run.records), run.manifest["rounds"]) == (sizes[-1], [23, 46, 92])
    (table, *_) = tables_to_print(load_experiment(tmp_path / "e"))
    assert any("limit=auto, at most 3 rounds: an interval is of 98.3 %" in x for x in table.notes)
    # What a larger limit has left on disk is not looked at before its round.
    run_job(job)
    again = standings(list(run_in_rounds(job, run_job).folders.values()))
    assert len(capsys.readouterr().err.splitlines()) == rounds
    assert [not standing.left for standing in again] == ["not told" not in last]


def test_a_probe_of_several_rates_is_ranked_over_all_of_them(tmp_path: Path, capsys: Any) -> None:
    methods = {name: build_method(name) for name in ("snapkv", "uniform")}
    plan = Wins({"uniform": ""}, 20, rates=(0.5, 0.125))
    run_in_rounds(make_job(tmp_path, methods, plan=plan), run_job)
    assert ", 20 of 20 examples: snapkv is best, told apart" in capsys.readouterr().err


def test_what_fails_is_run_again_by_the_next_command_alone(tmp_path: Path) -> None:
    runs = []

    @dataclass(frozen=True)
    class Fails(Wins):
        def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Fields]:
            for record in Wins.run(self, unit, methods, session):
                if unit.id == "u0":
                    runs.append(record["method"])
                    record |= {"status": "error", "error": "no", "score": None}
                yield record

    methods = {name: build_method(name) for name in ("snapkv", "uniform")}
    job = make_job(tmp_path, methods, plan=Fails({}, 92))
    for _ in range(2):
        run_in_rounds(replace(job, retry_failed=True), run_job)
    assert len(runs) == 4


def test_one_method_at_a_rate_cannot_be_told_apart(tmp_path: Path) -> None:
    methods = {name: build_method(name) for name in ("exact", "snapkv", "turboquant")}
    with pytest.raises(UserError, match="limit is 'auto' and the methods are exact, snapkv, turbo"):
        run_in_rounds(make_job(tmp_path, methods, plan=Wins({})), run_job)
