"""Nothing from elsewhere is executed, no secret is written, no file lands where it should not."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attacks import PACKAGE, RUN, SECRETS, SMALL, TYPED, leaks, model_folder, written
from support.chromium import BROWSER, Chromium
from support.cli_cases import ended
from support.report_runs import LINES_META, write_run

from kvbench.engine.loading import ModelError, ModelSpec, load_model, load_tokenizer
from kvbench.errors import HIDDEN, names_a_secret, redact
from kvbench.methods.snapkv import SnapKV
from kvbench.records.read import load_runs
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.render.comparison import write_comparison
from kvbench.report.tables.compare import compare

PICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "cPickle", "jsonpickle"}
COPIES_IN_MEMORY = {"compose.py"}  # unpickles what it pickled itself, the fastest copy of a config
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}


def sources() -> Iterator[tuple[Path, ast.AST]]:
    for file in PACKAGE.rglob("*.py"):
        yield file, ast.parse(file.read_text())


def test_the_package_unpickles_and_evaluates_nothing() -> None:
    seen = 0
    for file, tree in sources():
        seen += 1
        safe = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            and [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]
        }
        for node in ast.walk(tree):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            if file.name not in COPIES_IN_MEMORY:
                assert not names & PICKLING, f"{file}:{node}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in RUNS_TEXT, f"{file}: {called}"
                assert called not in ("torch.load", "numpy.load", "np.load", "yaml.unsafe_load"), (
                    file
                )
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if called == "yaml.load":
                    assert given.get("Loader") in safe, file
                assert given.get("allow_pickle", "False") == "False", file
                assert given.get("shell", "False") == "False", file
                assert given.get("weights_only", "True") == "True", file
                trusted = given.get("trust_remote_code", "")
                assert trusted in ("", "spec.trust_remote_code") or called == "ModelSpec", file
    assert seen > 50


def test_a_pickled_model_is_refused_in_one_line_and_not_opened(tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    folder = model_folder(tmp_path / "model", mark)
    found = ended(
        [*SMALL, "logger=none", "device=cpu", "model=hf", f"model.path={folder}"], folder=tmp_path
    )
    assert found.problem() is None, found
    assert found.status == 2
    assert f"model {str(folder)!r} cannot be loaded: " in found.err
    assert "safetensors" in found.err
    assert not mark.exists()
    assert not (tmp_path / "runs").exists(), "nothing was begun"
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # the trap works
    assert mark.exists()


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class EvilConfig(LlamaConfig):
    model_type = "evil"
class Evil(LlamaForCausalLM):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder: Path, mark: Path) -> Path:
    """A model whose folder brings code for its configuration, model and tokenizer."""
    shutil.copytree(PACKAGE / "assets" / "recall_mini", folder)
    (folder / "evil.py").write_text(CODE.format(mark=str(mark)))
    for name, entries in (
        ("config.json", {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.EvilTokenizer", None]}),
    ):
        path = folder / name
        config = json.loads(path.read_text())
        config["auto_map"] = entries
        if name == "config.json":
            config["model_type"] = "evil"
        else:
            config["tokenizer_class"] = "EvilTokenizer"
        path.write_text(json.dumps(config))
    return folder


def test_code_of_a_model_folder_is_not_run_unless_asked_for(tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    folder = with_code(tmp_path / "model", mark)
    found = ended(
        [*SMALL, "logger=none", "device=cpu", "model=hf", f"model.path={folder}"], folder=tmp_path
    )
    assert found.problem() is None, found
    assert found.status == 2
    assert "trust_remote_code" in found.err
    spec = ModelSpec(name="evil", path=str(folder))
    with pytest.raises(ModelError):
        load_model(spec, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ModelError):
        load_tokenizer(spec)
    assert not mark.exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_the_manifest_names_trust_in_remote_code(tmp_path: Path, trusted: bool) -> None:
    words = [*RUN, "logger=none", f"model.trust_remote_code={str(trusted).lower()}"]
    assert ended(words, folder=tmp_path).status == 0
    for run in load_runs(tmp_path / "runs" / "default"):
        assert run.manifest["identity"]["model"]["trust_remote_code"] is trusted
        assert run.manifest["config"]["model"]["trust_remote_code"] is trusted


def test_trust_in_remote_code_is_off_in_every_config_and_changes_the_hash() -> None:
    for path in (PACKAGE / "conf").rglob("*.yaml"):
        assert "trust_remote_code: true" not in path.read_text(), path
    assert not ModelSpec(name="a", path="b").trust_remote_code


@pytest.mark.parametrize("sweep", [False, True])
def test_no_secret_is_written_or_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: bool
) -> None:
    """Keys in the environment, and one that a user typed into an option that keeps it."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    words = [*RUN, "logger=wandb", "logger.mode=offline", f"model.revision={TYPED}", "-v"]
    words += ["-m", "seed=0,1"] if sweep else []
    # an error that tells a key is a record
    words += ["methods.snapkv._target_=test_security.Telling"] if not sweep else []
    found = ended(words, folder=tmp_path)
    assert found.status in (0, 1), found.err
    assert not leaks(tmp_path, found.out + found.err)
    files = {path.name for path in written(tmp_path)}
    assert {"manifest.json", "records.jsonl", "report.html"} <= files
    assert any(name.endswith(".wandb") for name in files), "W&B wrote its run"
    manifest = next(iter(load_runs(tmp_path / "runs" / "default"))).manifest
    assert manifest["identity"]["model"]["revision"] == HIDDEN
    assert f"model.revision={HIDDEN}" in manifest["command"]
    if not sweep:
        records = [
            r for r in written(tmp_path) if r.name == "records.jsonl" and "snapkv-" in str(r)
        ]
        (record,) = [json.loads(line) for line in records[0].read_text().splitlines()]
        assert record["status"] == "error"
        assert record["error"] == f"ValueError: GET https://{HIDDEN}@hub?token={HIDDEN} failed"


class Telling(SnapKV):
    """A method whose error tells what it should not."""

    def compress(self, layer: Any, budget: Any, generator: Any) -> Any:
        raise ValueError(f"GET https://me:secret99@hub?token={os.environ['HF_TOKEN']} failed")


def test_typed_secrets_are_refused_and_not_repeated(tmp_path: Path) -> None:
    for words in (
        [f"hydra.job.env_set.HF_TOKEN={TYPED}"],
        [f"+logger.api_key={TYPED}"],
        [f"+model.token={TYPED}"],
        [f"model.path=https://me:{TYPED}@host/model", "model=hf"],
        [f"--token={TYPED}"],
    ):
        base = [word for word in RUN if not (words[-1] == "model=hf" and word.startswith("model="))]
        found = ended([*base, "logger=none", *words], folder=tmp_path)
        assert found.status == 2, found
        assert found.problem() is None, found
        assert not leaks(tmp_path, found.out + found.err)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("keep_tokens=512 max_new_tokens=8 tokenizer=x", False),
        ("non-finite logits at new token 3", False),
        ("task.key=a-b", False),
        ("abc/def:80@x", False),
        (f"revision {TYPED}", True),
        ("https://user:pass@host/x", True),
        ("api_key=abc", True),
        ("{'HF_TOKEN': 'abc'}", True),
        ("password: abc", True),
        ("ghp_abcdefghijklmnop1234", True),
    ],
)
def test_redact(text: str, hidden: bool) -> None:
    assert (redact(text) != text) is hidden
    assert redact({"a": [text]}) == {"a": [redact(text)]}
    assert redact(7) == 7


def test_names_of_secrets() -> None:
    for name in (
        "HF_TOKEN",
        "a.api_key",
        "x.apikey",
        "secret",
        "my_password",
        "AWS_SECRET_ACCESS_KEY",
    ):
        assert names_a_secret(name), name
    for name in ("keep_tokens", "task.max_new_tokens", "model.tokenizer", "line_key", "seed"):
        assert not names_a_secret(name), name


ATTACK = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
QUOTES = "\"><svg onload=document.title='owned'>'`${document.title='owned'}{{7*7}}"


def hostile_experiment(results: Path) -> Path:
    """Runs whose every name, label, field and error is an attack, as a stranger's results may be."""
    for seed, method in enumerate((ATTACK, QUOTES, "exact")):
        records = [
            {
                "example_id": f"{QUOTES}-{number}",
                "dataset": ATTACK,
                "num_lines": ATTACK if number else QUOTES,
                "depth": 50,
                "prediction": ATTACK,
                "answers": [QUOTES, ATTACK],
                "prompt_tail": f"</script>{ATTACK}",
                "score": 0.5,
                "status": "ok" if number < 3 else "error",
                "error": None if number < 3 else f"{ATTACK}: {QUOTES}",
            }
            for number in range(4)
        ]
        write_run(
            results,
            task=f"task {ATTACK}",
            method=method,
            records=records,
            task_meta=LINES_META | {"breakdown": ["num_lines", QUOTES]},
            experiment="demo",
            model=f"model {QUOTES}",
            options={f"method.{ATTACK.replace('.', '')}": QUOTES, "method.x": seed},
        )
    return results / "demo"


def no_markup(text: str) -> bool:
    """Whether none of the attacks stands in a text as it was written."""
    return not any(part in text for part in ("<img src=x", "<svg onload", "<script>document"))


def test_the_comparison_of_two_hostile_experiments_holds_no_markup(tmp_path: Path) -> None:
    folders = [hostile_experiment(tmp_path / name) for name in "ab"]
    for file in folders[1].rglob("records.jsonl"):
        file.write_text(file.read_text().replace('"score": 0.5', '"score": 0.25'))
    compared = compare(*map(load_experiment, folders))
    paths = write_comparison(compared, tmp_path / "out")
    assert {path.suffix for path in paths} == {".html", ".md", ".csv"}
    assert all(no_markup(path.read_text()) for path in paths if path.suffix != ".csv")


def test_the_page_runs_nothing_that_data_say(tmp_path: Path) -> None:
    folder = hostile_experiment(tmp_path)
    report = build_report(folder)
    page, text = report.page, report.page.read_text()
    assert no_markup(text)
    assert all(no_markup(path.read_text()) for path in report.tables if path.suffix != ".csv")
    assert "49" not in [part.strip() for part in text.split("'") if part.strip() == "49"]
    if BROWSER is None:
        pytest.skip("needs Chromium")
    with Chromium(tmp_path / "profile") as browser:
        browser.open(page)
        assert "owned" not in browser.evaluate("document.title")
        assert browser.evaluate("document.querySelectorAll('[onerror],[onload]').length") == 0
        assert browser.evaluate("document.querySelectorAll('img[src=\"x\"]').length") == 0
        for opened in ("details", "button", "th", "summary"):
            browser.evaluate(f"document.querySelectorAll({opened!r}).forEach(e => e.click())")
        assert "owned" not in browser.evaluate("document.title")
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


def test_a_foreign_results_folder_cannot_write_outside_itself(tmp_path: Path) -> None:
    """Names with paths in them, in every field that could become a file name."""
    inside = tmp_path / "results" / "demo"
    up = "../../../escape"
    for method in ("exact", "snapkv"):
        run = write_run(
            tmp_path / "results",
            task="task",
            method=method,
            records=[
                {"example_id": f"{up}{n}", "dataset": up, "num_lines": n, "score": 0.5, "depth": 0}
                for n in range(3)
            ],
            task_meta=LINES_META,
            experiment="demo",
            model="model",
        )
        path = run / "manifest.json"
        manifest = json.loads(path.read_text())
        for field in ("experiment", "model", "task", "method", "config_hash"):
            manifest[field] = f"{up}-{field}" if field != "method" else f"{up}-{method}"
        manifest["task_meta"] |= {"subject": f"/tmp/escape/{up}", "breakdown": ["num_lines", up]}
        path.write_text(json.dumps(manifest))
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(inside)}
    report = build_report(inside)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(inside)} == before
    for path in (report.page, *report.tables, *report.figures):
        assert path.resolve().is_relative_to(inside.resolve()), path
        assert path.exists()
    assert not Path("/tmp/escape").exists()
