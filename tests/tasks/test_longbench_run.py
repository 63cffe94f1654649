"""LongBench end to end on the shipped model: experiments, tables beside the papers', model configs."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from hydra.utils import instantiate
from support.configs import composed
from support.paths import DATA

from kvbench.cli.catalogue import config_dir
from kvbench.cli.main import main
from kvbench.engine.loading import ModelSpec, checked_config
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.records.read import load_runs
from kvbench.tasks.longbench import BUCKETS, E_DATASETS

MODELS = sorted(
    path.stem for path in (config_dir() / "model").glob("[!_]*.yaml") if path.stem != "hf"
)
TABLE1 = {"exact", "streaming_llm", "pyramidkv", "snapkv", "uniform", "balancekv"}


def run(folder: Path, experiment: str, *overrides: str) -> int:
    narrow = ["model=recall_mini", f"task.data={DATA}", "logger=none", f"results_dir={folder}"]
    with pytest.raises(SystemExit) as stop:
        main([f"experiment={experiment}", *narrow, *overrides])
    return int(stop.value.code or 0)


@pytest.fixture(scope="module", autouse=True)
def _short_answers():
    """Of 8 tokens and not up to 512: the limits themselves are pinned beside the templates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.tasks.longbench.task.max_new_tokens", lambda dataset: 8)
        yield


@pytest.fixture(scope="module")
def table1(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert run(folder, "balancekv_table1", "task.per_dataset=1", "task.max_input=300") == 0
    return folder / "balancekv_table1"


def test_table_1_has_every_method_and_dataset_beside_the_papers(table1):
    records = pd.concat(r.records for r in load_runs(table1))
    assert set(records["method"]) == TABLE1
    assert set(records["dataset"]) == set(E_DATASETS)
    assert set(records["length_bucket"]) <= set(BUCKETS)
    assert set(records["status"]) == {"ok"}
    (file,) = (table1 / "tables").glob("*published.csv")
    published = pd.read_csv(file)
    llama = published[published["published_model"] == "Llama-3.1-8B-Instruct"]
    cell = llama[(llama["method"] == "balancekv") & (llama["column"] == "repobench-p")]
    assert cell["published"].tolist() == [41.4]
    assert set(published["column"]) == {*E_DATASETS, "average"}
    latex = (table1 / "tables" / "longbench-recall_mini.tex").read_text()
    assert "passage" in latex
    assert "\\toprule" in latex
    page = (table1 / "report.html").read_text()
    assert "balancekv_table1" in page
    assert "46.77" in page


def test_the_average_is_the_plain_mean_over_datasets(table1):
    (csv,) = (p for p in (table1 / "tables").glob("longbench-recall_mini.csv"))
    frame = pd.read_csv(csv)
    exact = frame[frame["method"] == "exact"].set_index("dataset")["score"]
    assert exact["average"] == pytest.approx(exact.drop("average").mean(), rel=1e-4)


def test_more_examples_join_those_that_are_there(tmp_path, capsys):
    narrow = ["task.datasets=[trec]", "task.max_input=200"]
    assert run(tmp_path, "balancekv_table6", "task.per_dataset=1", *narrow) == 0
    assert re.search(
        r"1 examples to run with 3 methods on cpu; 200 prompt", capsys.readouterr().out
    )
    assert run(tmp_path, "balancekv_table6", *narrow) == 0
    told = capsys.readouterr().out
    assert "2 examples to run" in told
    assert re.search(r"about [\d.]+ (s|min) \(at most", told)
    found = load_runs(tmp_path / "balancekv_table6")
    assert [len(one.records) for one in found] == [3, 3, 3]
    records = pd.concat(one.records for one in found)
    assert set(records["prompt_tokens"]) == {200}
    assert (records["truncated_tokens"] > 0).all()


def test_sums_by_category_and_a_cache_of_one_size(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for name in ("qasper", "multifieldqa_en", "lcc", "repobench-p"):
        (tmp_path / "data" / f"{name}.jsonl").write_bytes((DATA / f"{name}_e.jsonl").read_bytes())
    datasets = "task.datasets=[qasper,multifieldqa_en,lcc,repobench-p]"
    options = [
        "budget.size=128",
        "methods.subgen.recent=64",
        "task.per_dataset=1",
        datasets,
        f"task.data={tmp_path / 'data'}",
    ]
    narrow = ["model=recall_mini", "logger=none", f"results_dir={tmp_path}"]
    with pytest.raises(SystemExit) as stop:
        main(["experiment=subgen_table2", *narrow, *options])
    assert not stop.value.code
    for found in load_runs(tmp_path / "subgen_table2"):
        for entries in found.records["entries"]:
            assert found.manifest["method"] == "exact" or entries["max"] == 128
    (file,) = (tmp_path / "subgen_table2" / "tables").glob("*published.csv")
    assert {"single_doc_qa", "code"} <= set(pd.read_csv(file)["column"])


def model_spec(name: str) -> ModelSpec:
    """The model of a config, as the command line composes it."""
    path = ["model.path=someone/model"] if name == "hf" else []
    return instantiate(composed(f"model={name}", "task_label=t", *path).model, _convert_="all")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_config_makes_a_model_that_can_be_run(name):
    spec: ModelSpec = model_spec(name)
    if spec.revision is not None:
        assert re.fullmatch(r"[0-9a-f]{40}", spec.revision)
    architecture = checked_config(spec)
    if spec.max_input is not None:
        assert spec.max_input + 512 <= architecture.max_position_embeddings
    assert not spec.trust_remote_code


def test_a_chat_template_of_the_config_goes_around_the_prompt():
    template = model_spec("longchat_7b_v15_32k").chat_template
    from kvbench.engine.loading import load_tokenizer, prompt_encoder

    spec = ModelSpec(name="m", path="asset:recall_mini", chat_template=template)
    made = load_tokenizer(spec)
    text = prompt_encoder(made, spec).render_chat("Hello?")
    assert text.endswith("answers to the user's questions. USER: Hello? ASSISTANT:")
    assert "assistant gives helpful" in text


def test_the_released_preset_is_the_released_code():
    method = build_method("balancekv", preset="released")
    assert (method.block_size, method.gamma, method.weights) == (128, 4.0, "released")
    assert (method.centre, method.order, method.selection) == ("released", "released", "cut")
    paper = build_method("balancekv")
    assert (paper.block_size, paper.gamma) == (256, 4.0)
    budget = Budget()
    assert (budget.rate, budget.sink, budget.window) == (0.25, 32, 32)


def test_a_budget_by_size():
    budget = Budget(size=100)
    assert [budget.capacity(n) for n in (50, 100, 101, 5000)] == [50, 100, 100, 100]
    assert budget.rate_of(164) == pytest.approx(0.36)
    assert Budget().rate_of(164) == 0.25
    with pytest.raises(KVError, match=r"budget.size is 64; allowed: more than .*, 64"):
        Budget(size=64)
