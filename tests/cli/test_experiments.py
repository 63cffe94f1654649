"""The experiments run what the published tables beside them mean, or name the difference."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from hydra.utils import instantiate
from kvbench.cli.papers import paper_items
from omegaconf import OmegaConf
from scipy.stats import chisquare
from support.command import main, refusal_of
from support.configs import composed
from support.method_layers import make_layer, run
from support.paths import DATA, ROOT

from kvbench.cli.build import build_job
from kvbench.cli.catalogue import config_dir
from kvbench.engine.generate import run_forks
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget, KVError, LayerKV
from kvbench.methods import build_method
from kvbench.records.read import load_runs

EXPERIMENTS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((config_dir() / "experiment").glob("[!_]*.yaml"))
}
PUBLISHED = sorted(name for name, config in EXPERIMENTS.items() if config.get("paper_table"))
NEEDED = {"balancekv_figure4": ["task.haystack_files=[x]"], "subgen_table1": ["task.files=[x]"]}


def methods_of(config: Any) -> dict[str, Any]:
    return {
        label: instantiate(node, _convert_="all")
        for label, node in config.methods.items()
        if not label.startswith("minference")
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_stands_beside_a_published_table_says_how_it_differs(name: str, capsys: Any) -> None:
    specs = OmegaConf.to_container(composed(f"experiment={name}").paper_table)
    specs = specs if isinstance(specs, list) else [specs]
    assert all(isinstance(spec, dict) and "differences" in spec for spec in specs)
    status, out, err = main(capsys, "show", f"experiment={name}", *NEEDED.get(name, []))
    assert (status, err) == (0, "")
    comments = [line for line in out.splitlines() if line.startswith("#")]
    lines = {line for spec in specs for line in spec["differences"]}
    assert len(comments) == max(1, len(lines))
    for line in lines:
        assert any(f"# differs from the paper: {line} (" in comment for comment in comments)
    assert yaml.safe_load(out)["paper_table"]  # still YAML, comments and all


def test_an_experiment_without_a_published_table_has_no_such_comment(capsys: Any) -> None:
    assert "differs" not in main(capsys, "show", "experiment=demo")[1]


def test_wrong_differences_are_one_line(capsys: Any) -> None:
    status, _, err = main(
        capsys, "show", "experiment=balancekv_table6", "paper_table.differences=none"
    )
    assert (status, err.count("\n")) == (2, 1)
    assert "paper_table.differences is 'none'; allowed: a list of lines" in err


# SubGen


@pytest.mark.parametrize("reduction", [35, 42, 50])
def test_subgens_table_1_keeps_the_papers_entries(reduction: int) -> None:
    """2,048 or 3,072 recent tokens and the rest centres, so many per cent less in all."""
    share = 1 - reduction / 100
    config = composed(
        "experiment=subgen_table1", "task.files=[x]", f"budget.total_rate={share:.2f}"
    )
    methods, budget = methods_of(config), instantiate(config.budget)
    variants = {label: m for label, m in methods.items() if label.startswith("subgen")}
    assert {m.recent for m in variants.values()} == {2048, 3072}
    n = {35: 5000, 42: 7000, 50: 9000}[reduction]
    layer = make_layer(n, batch=1, kv_heads=1, dim=4, seed=1)
    for method in (*variants.values(), methods["streaming_llm"]):
        kept = run(method, layer, budget).positions[0, 0].tolist()
        assert len(set(kept)) == round(share * n)
        recent = getattr(method, "recent", round(share * n) - 32)
        assert set(range(n - recent, n)) <= set(kept)
    assert methods["h2o"].evicts
    runs = paper_items()["subgen_table1"].runs
    assert sum(line.endswith(f"budget.total_rate={share:.2g}") for line in runs) == 1


def test_subgens_table_2_is_half_recent_and_half_centres() -> None:
    config = composed("experiment=subgen_table2")
    methods, budget = methods_of(config), instantiate(config.budget)
    layer = make_layer(2600, batch=1, kv_heads=2, dim=4, seed=2)
    kept = run(methods["subgen"], layer, budget).positions[0]
    for head in kept.tolist():
        assert len(set(head)) == 2048
        assert sorted(head)[1024:] == list(range(2600 - 1024, 2600))


# BalanceKV, Table 5


def halved(signs: list[int]) -> tuple[list[int], dict[int, int]]:
    """Step 4 of the method, sign by sign: which of an even number of entries go, and what the others
    weigh. The last place at which a class reaches half counts."""
    half, seen, end = len(signs) // 2, Counter[int](), 0
    for place, sign in enumerate(signs):
        seen[sign] += 1
        if seen[sign] == half:
            end = place
    dropped = [p for p in range(end + 1) if signs[p] == signs[end]]
    weights = {p: 2 if p <= end else 1 for p in range(len(signs)) if p not in dropped}
    return dropped, weights


def chosen_by(method: Any, budget: Budget, layer: LayerKV) -> list[tuple[tuple[int, int], ...]]:
    """Of every head, the middle's positions that are kept, with their weights."""
    kept = run(method, layer, budget, seed=5)
    weights = (
        torch.zeros_like(kept.positions) if kept.log_weights is None else kept.log_weights
    ).exp()
    found = []
    for positions, row in zip(kept.positions[0].tolist(), weights[0].tolist(), strict=True):
        entries = zip(positions, (round(w, 4) for w in row), strict=True)
        inside = range(budget.sink, layer.n - budget.window)
        found.append(tuple((p - budget.sink, w) for p, w in entries if p in inside))
    return found


def test_uniform_in_the_subset_has_the_odds_of_coin_flips() -> None:
    """4,000 heads against every sequence of signs: the first six of a middle of ten are halved (rate
    0.7), the first sign of a block being +1."""
    layer = make_layer(14, batch=1, kv_heads=4000, group=1, dim=2, seed=3)
    budget = Budget(rate=0.7, sink=2, window=2)
    odds: Counter[tuple[tuple[int, int], ...]] = Counter()
    for flips in itertools.product((1, -1), repeat=5):
        _, weights = halved([1, *flips])
        whole = {**weights, **dict.fromkeys(range(6, 10), 1)}
        odds[tuple(sorted(whole.items()))] += 1
    found = Counter(chosen_by(build_method("uniform", scope="subset"), budget, layer))
    assert set(found) <= set(odds)
    expected = [4000 * odds[one] / 32 for one in odds]
    assert chisquare([found[one] for one in odds], expected).pvalue > 1e-3
    everywhere = Counter(chosen_by(build_method("uniform"), budget, layer))
    assert not set(everywhere) <= set(odds)  # drops any, and all weigh 10/7


@pytest.mark.parametrize("rate", [0.95, 0.9, 0.8, 0.5, 0.3, 0.25])
def test_uniform_in_the_subset_is_balancekv_without_balance(rate: float) -> None:
    """The same positions and weights as gamma = 0; beside the balanced walk, the same part may go."""
    layer = make_layer(700, batch=1, kv_heads=3, dim=8, seed=4)
    budget = Budget(rate=rate, sink=16, window=16)
    subset = chosen_by(build_method("uniform", scope="subset"), budget, layer)
    assert subset == chosen_by(build_method("balancekv", gamma=0.0), budget, layer)
    balanced = chosen_by(build_method("balancekv"), budget, layer)
    assert subset != balanced
    middle = layer.n - 32
    kept = round(rate * middle)
    touched = min(middle, 2 * (middle - kept))
    for head in (*subset, *balanced):
        assert len(head) == kept
        assert [p for p, _ in head if p >= touched] == list(range(touched, middle))
        assert {w for p, w in head if p >= touched} <= {1.0}
        assert {w for p, w in head if p < touched} <= {1.0, 2.0, 4.0}
    plain = chosen_by(build_method("uniform", scope="subset", weighted=False), budget, layer)
    assert plain == [tuple((p, 1.0) for p, _ in head) for head in subset]


def test_table_5_halves_the_same_part_in_both_variants() -> None:
    config = composed("experiment=balancekv_table5", "budget.rate=0.9")
    methods, budget = methods_of(config), instantiate(config.budget)
    layer = make_layer(1064, batch=1, kv_heads=4, dim=8, seed=6)
    for label in ("uniform", "balancekv"):
        for head in chosen_by(methods[label], budget, layer):
            missing = set(range(1000)) - {p for p, _ in head}
            assert len(missing) == 100
            assert max(missing) < 200
    with pytest.raises(KVError, match=r"uniform\.scope is 'all'; allowed: middle \| subset"):
        build_method("uniform", scope="all")


# H2O, Tables 3 and 5


@pytest.mark.parametrize(
    ("experiment", "more", "released"),
    [
        ("h2o_table3", [], {(512, 32): 0.1, (512, 512): 0.2, (512, 1024): 0.3}),
        ("h2o_table5", [], {(2048, 2048): 0.2}),
        ("h2o_table5", ["task.settings=[[5000,5000,4,0.4]]"], {(5000, 5000): 0.2}),
        ("h2o_table5", ["task.settings=[[7000,1024,1,0.22]]"], {(7000, 1024): 0.11}),
    ],
)
def test_twenty_per_cent_is_twenty_per_cent(
    experiment: str, more: list[str], released: dict[tuple[int, int], float]
) -> None:
    """`released`: --hh-ratio of h2o_suite.py, of which int(ratio * prompt) entries are heavy and as many
    recent; about a fifth of prompt and answer, which the table's name for it is."""
    config = composed(f"experiment={experiment}", "device=cpu", *more)
    job: Any = build_job(config)
    settings = job.plan._settings()
    assert {(s.prompt_tokens, s.new_tokens) for s in settings} == set(released)
    for setting in settings:
        n, new = setting.prompt_tokens, setting.new_tokens
        for label, (method, budget) in job.methods.items():
            if not method.uses_budget:
                continue
            held = setting.budget(budget).capacity(n)
            assert abs(held - 2 * int(released[n, new] * n)) <= 1, label
            assert held / (n + new) == pytest.approx(0.2, abs=0.013)
    assert job.methods["h2o"][0].evicts
    assert job.methods["local"][0].evicts
    runs = paper_items()[experiment].runs
    assert all(any(shlex.quote(word) in line for line in runs) for word in more)


def test_local_holds_what_h2o_holds_to_the_last_token() -> None:
    """In bytes, measured: both variants of H2O's tables stay at their share; by default Local grows."""
    from support.tiny import prompt_ids, tiny_model

    model = tiny_model("opt")
    model.set_attn_implementation("kvbench")
    config = composed("experiment=h2o_table3")
    methods = methods_of(config)
    budget = Budget(total_rate=0.2, sink=8, window=8)
    ids = prompt_ids(100)
    labels = ("local", "h2o")
    answers = run_forks(
        model,
        ids,
        [],
        {
            **{label: (methods[label], budget) for label in labels},
            "grows": (build_method("local"), budget),
        },
        Stopping(12),
        seed=0,
        example_id="x",
    )
    for label in labels:
        assert answers[label].failure is None
        assert answers[label].entries == {"mean": 20, "max": 20}
        assert answers[label].cache_bytes_end == answers[label].cache_bytes
    assert answers["grows"].cache_bytes == answers["local"].cache_bytes
    assert answers["grows"].cache_bytes_end > answers["grows"].cache_bytes  # type: ignore[operator]


# Where runs go


def test_runs_go_to_an_ignored_folder_and_results_are_written_by_name_only() -> None:
    assert composed().results_dir == "runs"
    ignored = subprocess.run(["git", "check-ignore", "-q", "runs/demo/report.html"], cwd=ROOT)
    if (ROOT / ".git").exists():
        assert ignored.returncode == 0
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z0-9-]+): setup ", makefile, re.M)
    written = {}
    for target in targets:
        line = ["make", "-n", target, "EXPERIMENT=demo", "-o", "setup"]
        told = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        written[target] = set(re.findall(r"results_dir=(\w+)", told))
    assert {name for name, folders in written.items() if "results" in folders} == {
        "frontier",
        "results",
    }
    assert written["demo"] == written["reproduce"] == {"runs"}


# BalanceKV, Table 1


def test_every_layout_is_of_a_published_table_that_is_there() -> None:
    tables = yaml.safe_load((ROOT / "results/paper/tables.yaml").read_text())
    files = {path.stem for path in (ROOT / "results/paper").glob("*.csv")}
    assert set(tables) <= files
    for name in PUBLISHED:
        specs = EXPERIMENTS[name]["paper_table"]
        for spec in specs if isinstance(specs, list) else [specs]:
            kept = set(spec) - {"where"}
            assert kept <= {"file", "differences"}, "layouts stand beside the tables"


def minference_line() -> list[str]:
    """The overrides of the documented line; the same in the Makefile and the experiment's YAML."""
    pattern = re.compile(r"make reproduce-balancekv-table1 ARGS='([^']*minference[^']*)'")
    files = (ROOT / "Makefile", config_dir() / "experiment/balancekv_table1.yaml")
    lines = {line for file in files for line in pattern.findall(file.read_text())}
    (line,) = lines
    return shlex.split(line)


def test_the_line_for_minferences_choice_composes() -> None:
    line = minference_line()
    assert refusal_of(["experiment=balancekv_table1", "model=recall_mini", *line]) is None
    config = composed("experiment=balancekv_table1", "model=recall_mini", *line)
    for cluster in ("snapkv", "pyramidkv"):
        node = config.methods[f"minference_{cluster}"]
        assert node._target_ == "kvbench.methods.minference.MInference"
        assert node.cluster == cluster
    tables = yaml.safe_load((ROOT / "results/paper/tables.yaml").read_text())
    names = tables[config.paper_table.file]["names"]
    assert {label for ours in names.values() for label in ours} >= {*config.methods} - {
        *("exact", "streaming_llm", "uniform", "balancekv")
    }


def test_the_page_states_entries_and_bytes_of_both_choices(tmp_path: Path, capsys: Any) -> None:
    """Per KV head and per query head in one folder, on a model with two query heads a group: as many
    entries, twice the bytes, and both beside the paper's number. Our own choice per query head, which
    tests/references holds to MInference's, stands in where that package is not installed."""
    common = [
        *(
            "experiment=balancekv_table1",
            "model=recall_mini",
            "logger=none",
            f"results_dir={tmp_path}",
        ),
        *(f"task.data={DATA}", "task.per_dataset=1", "task.datasets=[trec]", "task.max_input=300"),
    ]
    per_query_head = [
        "~methods.exact",
        *("+methods.minference_snapkv._target_=kvbench.methods.snapkv.SnapKV",),
        "+methods.minference_snapkv.granularity=query_head",
    ]
    assert main(capsys, *common, "method=[exact,snapkv]")[0] == 0
    assert main(capsys, *common, "method=[exact]", *per_query_head)[0] == 0
    runs = load_runs(tmp_path / "balancekv_table1")
    held = {found.manifest["method"]: found.records.iloc[0] for found in runs}
    ours, theirs = held["snapkv"], held["minference_snapkv"]
    assert theirs["entries"] == ours["entries"]
    assert theirs["cache_bytes"] / ours["cache_bytes"] == pytest.approx(2.0, rel=1e-6)
    shown = pd.read_csv(tmp_path / "balancekv_table1" / "tables" / "longbench-recall_mini.csv")
    shown = shown.set_index("variant")
    assert shown["entries_mean"]["minference_snapkv"] == shown["entries_mean"]["snapkv"]
    ratios = shown["ratio"]
    assert ratios["minference_snapkv"] == pytest.approx(2 * ratios["snapkv"], rel=1e-4)
    page = (tmp_path / "balancekv_table1" / "report.html").read_text()
    for value in (ratios["snapkv"], ratios["minference_snapkv"]):
        assert f"<span>{value:.3f}</span></td>" in page
    assert page.count(f"<span>{shown['entries_mean']['snapkv']:.0f}</span></td>") == 2
    (file,) = (tmp_path / "balancekv_table1" / "tables").glob("*published.csv")
    beside = pd.read_csv(file)
    beside = beside[beside["published_model"] == "Llama-3.1-8B-Instruct"].set_index("variant")
    assert beside["published"]["minference_snapkv"] == beside["published"]["snapkv"]
    assert math.isfinite(beside["published"]["snapkv"])
