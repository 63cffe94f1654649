"""What stands in results/README*.md follows tables and records: a sentence that compares is refused
where a table denies it, and what solving loses and wins is counted prompt by prompt."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


readme_tables = script("readme_tables")
lost_and_won = script("lost_and_won")

SCORES = """model,method,rate,measure,by,mean,p,mark
toy,exact,,score,dataset,97.5,,
toy,snapkv,0.25,score,dataset,95,,best
toy,h2o,0.25,score,dataset,40,,worse
toy,kvzip,0.25,score,dataset,81.4,,tied
toy,h2o,0.25,difference,dataset,-57.5,0.001,
toy,snapkv,0.25,difference,dataset,-2.5,1,
"""
PAIRS = """first,second,p
"snapkv, rate 0.25","h2o, rate 0.25",0.002
"snapkv, rate 0.25","kvzip, rate 0.25",0.06
"""
BY_RATE = """model,method,rate,measure,by,value,mean,mark
toy,exact,,score,rate,0.25,0,
toy,solved,,score,rate,0.25,0.0114,best
toy,kvzip,,score,rate,0.25,0.0371,
toy,snapkv,,score,rate,0.25,0.02,tied
"""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tables = tmp_path / "leaderboard/tables"
    tables.mkdir(parents=True)
    (tables / "needles-toy.csv").write_text(SCORES)
    (tables / "needles-toy-pairs.csv").write_text(PAIRS)
    (tables / "fidelity-toy.csv").write_text(SCORES)
    (tables / "fidelity-toy-pairs.csv").write_text(PAIRS.replace(", rate 0.25", ""))
    (tables / "fidelity-toy-by-rate.csv").write_text(BY_RATE)
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("says", "denied"),
    [
        ("needles toy 0.25: snapkv 95 > h2o 40; snapkv 95 ≈ kvzip 81", ""),
        ("needles toy 0.25: h2o 40.0 < exact 98; snapkv ≈ exact; kvzip 81.4", ""),
        ("needles toy 0.25: snapkv ≈ h2o", "snapkv > h2o, not ≈"),
        ("needles toy 0.25: h2o > snapkv", "h2o < snapkv, not >"),
        ("needles toy 0.25: snapkv > kvzip", "snapkv ≈ kvzip, not >"),
        ("needles toy 0.25: snapkv 94", "snapkv is 95, not 94"),
        ("needles toy 0.25: h2o > kvzip", "no pair of"),
        ("needles toy 0.25: subgen 12", "no score of subgen"),
        ("needles toy 0.25: snapkv better than h2o", "is no statement"),
        ("needles other 0.25: snapkv 95", "needles-other"),
        ("fidelity toy 0.25: solved 0.011 < kvzip 0.037; solved ≈ snapkv", ""),
        ("fidelity toy 0.25: solved < snapkv", "solved ≈ snapkv, not <"),
        ("fidelity toy 0.25: snapkv < kvzip", "no pair of"),
        ("fidelity toy: snapkv > h2o", ""),
    ],
)
def test_a_sentence_that_a_table_denies_is_found(results: Path, says: str, denied: str) -> None:
    found = readme_tables.untrue(f"A sentence.\n<!-- says leaderboard/{says} -->")
    assert len(found) == bool(denied)
    assert denied in "".join(found)


@pytest.mark.parametrize("name", ["results/README.md", "results/README-more.md"])
def test_a_paragraph_that_speaks_of_significance_is_checked(name: str) -> None:
    """What a page says of a test stands beside the comment from which it is checked; claims.csv has the
    test of each claim."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"<!-- table .*?<!-- end .*? -->", "", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\n|\n(?=- )", text):
        if "significant" in paragraph and "claims.csv" not in paragraph:
            assert "<!-- says " in paragraph, paragraph


CLAIM = "id,place,measure,claim,verdict,decides,comparison,claimed,result"
CLAIMS = {
    "claims": f"""{CLAIM},times,times_low,times_high
B1,4.1,as stated,it is lower,fails,False,error: a / b,below 1,holds,0.8,0.7,0.9
B1,4.1,as stated,it is lower,fails,True,error: a / c,below 1,fails,1.25,1.1,1.42
""",
    "claims_gemma3": f"""{CLAIM},difference,difference_low,difference_high
B1,4.1,as stated,it is lower,needs a GPU,True,error,,needs a GPU,,,
""",
}


def test_claims_of_two_models_stand_in_one_row(results: Path) -> None:
    for folder, text in CLAIMS.items():
        (results / folder).mkdir()
        (results / folder / "claims.csv").write_text(text)
    *_, row = readme_tables.claims().splitlines()
    assert row == (
        "| B1 | it is lower (4.1) | as stated | **fails** (1 of 2); error: a / c = 1.25 times"
        " [1.1, 1.42], claimed below 1 | **needs a GPU** (0 of 1); error |"
    )


def record(method: str, prompt: int, score: float, held: int, **more: object) -> dict[str, object]:
    about = {"experiment": "leaderboard", "model": "toy", "task": "needles", "rate": 0.25}
    sizes = {"prompt_tokens": 101, "held_back": 1, "exact_bytes": 1000, "entries_mean": 25.0}
    costs = {"cache_bytes": held, "ratio": held / 1000}
    return {
        **about,
        "method": method,
        "example_id": prompt,
        "score": score,
        **sizes,
        **costs,
        **more,
    }


def test_what_solving_loses_and_wins_is_counted_by_prompt() -> None:
    found = {"snapkv": [1, 1, 0, 0], "solved_snapkv": [1, 0, 1, 0]}
    rows = [record(name, i, score, 250) for name, of in found.items() for i, score in enumerate(of)]
    rows += [{**row, "task": "fidelity"} for row in rows]  # a distance: the other way round
    rows.append(record("solved_kvgrad", 0, 1, 250))  # whose inner method was not run
    needles, fidelity = lost_and_won.lost_and_won(pd.DataFrame(rows))
    assert (needles["prompts"], needles["alone"], needles["solved"]) == (4, 0.5, 0.5)
    assert [(row["lost"], row["won"]) for row in (needles, fidelity)] == [(1, 1), (1, 1)]
    more = pd.DataFrame([*rows, record("snapkv", 4, 1, 250), record("solved_snapkv", 4, 0, 250)])
    assert next(lost_and_won.lost_and_won(more))["lost"] == 2


def test_bytes_beside_bfloat16_double_what_is_no_float() -> None:
    """Of 1,000 bytes 600 belong to layers that no method compresses."""
    rows = [
        record("exact", 0, 1, 1000, rate=float("nan"), entries_mean=100.0),
        record("snapkv", 0, 1, 600 + 100),
        record("solved", 0, 1, 600 + 100 + 2),  # log-weights
        record("turboquant", 0, 1, 600 + 50, rate=float("nan"), entries_mean=100.0),
    ]
    table = pd.DataFrame(lost_and_won.beside_bfloat16(pd.DataFrame(rows))).set_index("method")
    assert table["whole"].tolist() == pytest.approx([0.6] * 4)
    assert table["bfloat16"].to_dict() == pytest.approx(
        {"exact": 1.0, "snapkv": 0.7, "solved": 0.704, "turboquant": 0.7}
    )
