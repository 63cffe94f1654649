"""Nothing from elsewhere is executed, no secret is written, no file is written outside its folder, and
names and texts in other people's results are data only: never paths, markup, formulas or control codes.
"""

from __future__ import annotations

import ast
import json
import os
import unicodedata
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.attacks import PACKAGE, RUN, SECRETS, TYPED, leaks, written
from support.command import SHORT, composed, ended
from support.report_runs import LINES_META, write_run

from kvbench.cli.config import Settings
from kvbench.engine.model import ModelSpec
from kvbench.errors import HIDDEN, UserError, names_a_secret, redact
from kvbench.methods.snapkv import SnapKV
from kvbench.records.read import StoreError, load_run, load_runs
from kvbench.records.schema import COMMON_FIELDS
from kvbench.report.__main__ import main

UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load"}
CALLS |= {"os.system", "yaml.unsafe_load", "yaml.full_load"}
SAFE_VALUES = {"allow_pickle": "False", "shell": "False", "weights_only": "True"}


def test_the_package_unpickles_and_evaluates_nothing() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not {a.name.partition(".")[0] for a in node.names} & UNSAFE, file
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in UNSAFE, file
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in CALLS, (file, node.lineno)
                for keyword in node.keywords:
                    value = ast.unparse(keyword.value)
                    assert value == SAFE_VALUES.get(keyword.arg or "", value), (file, node.lineno)
                    if keyword.arg == "trust_remote_code":
                        function = ast.unparse(node.func)
                        assert "ModelSpec" in function or value.startswith("spec."), file


def test_no_model_runs_code_of_its_own_by_default() -> None:
    for path in (PACKAGE / "conf").rglob("*.yaml"):
        assert "trust_remote_code: true" not in path.read_text(), path
    assert not ModelSpec(name="a", path="b").trust_remote_code


class Leaking(SnapKV):
    def compress(self, layer: Any, budget: Any, generator: Any) -> Any:
        raise ValueError(f"GET https://me:secret99@hub?token={os.environ['HF_TOKEN']} failed")


def test_no_secret_is_written_or_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in the environment, one that a user typed, and one in an error that a record holds."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    words = [*RUN, "logger=wandb", "logger.mode=offline", f"model.revision={TYPED}", "-v"]
    words += ["methods.snapkv._target_=test_security.Leaking"]
    result = ended(words, folder=tmp_path)
    assert result.status == 1, result.err
    assert not leaks(tmp_path, result.out + result.err)
    files = {path.name for path in written(tmp_path)}
    assert {"manifest.json", "records.jsonl", "report.html"} <= files
    assert any(name.endswith(".wandb") for name in files), "W&B wrote its run"
    (folder,) = (tmp_path / "runs").iterdir()
    runs = {run.manifest["method"]: run for run in load_runs(folder)}
    manifest = runs["snapkv"].manifest
    assert manifest["config"]["model"]["revision"] == HIDDEN
    assert manifest["identity"]["model"]["trust_remote_code"] is False
    assert f"model.revision={HIDDEN}" in manifest["command"]
    message = f"ValueError: GET https://{HIDDEN}@hub?token={HIDDEN} failed"
    assert list(runs["snapkv"].records["error"]) == [message]


def test_a_secret_in_prompts_and_answers_is_replaced(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = 'q"uo\\te é secret'
    monkeypatch.setenv("MY_PASSWORD", secret)
    rows = tmp_path_factory.mktemp("data") / "rows.jsonl"
    row = {"context": f"The word is {secret}. " * 30, "question": f"{secret}?", "answers": secret}
    rows.write_text(json.dumps(row))
    words = ["task=jsonl", f"task.files=[{rows}]", *RUN[3:], "logger=wandb", "logger.mode=offline"]
    result = ended([*words, "results_dir=runs"], folder=tmp_path)
    assert result.status == 0, result.err
    forms = [form.encode() for form in (secret, json.dumps(secret)[1:-1])]
    for path, content in written(tmp_path).items():
        assert not [form for form in forms if form in content], path
    (folder,) = (tmp_path / "runs").iterdir()
    record = load_runs(folder)[0].records.iloc[0]
    assert record["answers"] == [HIDDEN]
    assert record["prompt_tail"].endswith(f"{HIDDEN}?\n") or HIDDEN in record["prompt_tail"]


SECRET = [f"revision {TYPED}", "https://user:pass@host/x", "api_key=abc", "{'HF_TOKEN': 'abc'}"]
SECRET += ["password: abc", "ghp_abcdefghijklmnop1234"]
PLAIN = ["chunk_tokens=512 max_new_tokens=8 tokenizer=x", "non-finite logits at new token 3"]
PLAIN += ["task.key=a-b", "abc/def:80@x"]


SECRET_NAMES = ["HF_TOKEN", "a.api_key", "secret", "my_password", "AWS_SECRET_ACCESS_KEY"]
PLAIN_NAMES = ["chunk_tokens", "task.max_new_tokens", "model.tokenizer", "line_key", "seed"]


def test_what_is_hidden_and_what_is_not() -> None:
    for text in (*SECRET, *PLAIN):
        assert (redact(text) != text) is (text in SECRET), text
        assert redact({"a": [text]}) == {"a": [redact(text)]}
    for name in (*SECRET_NAMES, *PLAIN_NAMES):
        assert names_a_secret(name) is (name in SECRET_NAMES), name


# Results from elsewhere.

WRONG: list[tuple[str, Sequence[str], Sequence[Any]]] = [
    ("records", ("seed", "status"), ([], "x", 1.5)),
    ("records", ("score", "ratio"), ([], "x", True)),
    ("records", ("dataset", "error"), ({}, 5, "\ud800")),
    ("records", ("example_id",), (None, ["a"], "\udfff")),
    ("records", ("entries", "answers", "compressed"), ("x",)),
    ("manifest", ("identity", "task_meta", "config"), ([], 5)),
    ("manifest", ("model", "method"), ([], 5, "\ud800")),
    ("manifest", ("seed",), ([], "x", 1.5)),
    ("manifest", ("earlier_starts",), (5, None, {}, [5])),
]
"""Files of a run, keys of them, and values that these keys may not have."""


def change(path: Path, key: str, value: Any) -> None:
    """Set a key, ``a.b`` being b within a, in a manifest or in the second line of a records file."""
    if path.suffix == ".jsonl":
        first, text, *others = path.read_text().split("\n")
    else:
        text = path.read_text()
    content = inner = json.loads(text)
    *above, last = key.split(".")
    for part in above:
        inner = inner.setdefault(part, {})
    inner[last] = value
    changed = json.dumps(content)
    path.write_text("\n".join([first, changed, *others]) if path.suffix == ".jsonl" else changed)


def test_a_value_of_a_wrong_type_is_named_in_one_line(tmp_path: Path) -> None:
    rows = [{"example_id": f"e{i}", "num_lines": 5, "score": 1.0} for i in range(3)]
    run = write_run(tmp_path, task="t", method="exact", records=rows, task_meta=LINES_META)
    files = {path.stem: path for path in run.iterdir() if path.suffix}
    before = {name: path.read_bytes() for name, path in files.items()}
    for name, keys, values in WRONG:
        for key, value in product(keys, values):
            change(files[name], key, value)
            with pytest.raises(StoreError, match=r"^[^\n]{,1500}$") as error:
                load_runs(tmp_path / "demo")
            is_half_a_character = isinstance(value, str) and not value.isascii()
            assert ("not JSON" if is_half_a_character else key) in str(error.value), (key, value)
            assert files[name].name in str(error.value)
            files[name].write_bytes(before[name])
    for key in set(COMMON_FIELDS) - {"example_id", "status"}:
        change(files["records"], key, None)
    assert load_run(run).records["score"].isna()[1], "null is allowed"
    change(files["manifest"], "seed", "x")
    result = ended([str(tmp_path / "demo")], main=main)
    assert (result.status, result.err.count("\n")) == (1, 1), result.err


def test_a_secret_does_not_become_a_folders_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrst")
    with pytest.raises(UserError, match="experiment_name holds a secret of the environment"):
        Settings.of(composed(*SHORT, "experiment_name=${oc.env:HF_TOKEN}"))


ATTACK = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
QUOTES = "\"><svg onload=document.title='owned'>'`${document.title='owned'}{{7*7}}"
UP = "../../../escape"
NAMES = [ATTACK, QUOTES, UP, "/tmp/escape", "\x1b]0;owned\x07", "\u202egnp.exe", "a\rb\nc"]
NAMES += ["$\\frac{", "=1+1", "+cmd|' /C calc'!A0", "@SUM(A1)", "é" * 300, "x" * 100_000]


def write_hostile_runs(folder: Path) -> None:
    run_name = f"{UP}{QUOTES}\x1b]0;owned\x07"
    for method in ("exact", f"m{run_name}"):
        rows: list[dict[str, Any]] = []
        for i, name in enumerate(NAMES):
            row = {"example_id": f"{name}{i}", "dataset": name, "num_lines": name, "score": 0.5}
            row |= {"prediction": name, "answers": [name], "prompt_tail": f"</script>{name}"}
            failed = {"example_id": f"e{name}{i}", "status": "error", "error": name}
            rows += [row, {**row, **failed}]
        run = write_run(folder, task="t", method=method, records=rows, task_meta=LINES_META)
        for key in ("model", "task", "config_hash"):
            change(run / "manifest.json", key, run_name)
        change(run / "manifest.json", "task_meta.breakdown", ["num_lines", run_name])


def test_names_and_texts_of_other_peoples_results_are_data_only(tmp_path: Path) -> None:
    inside = tmp_path / "results"
    write_hostile_runs(inside)
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(inside)}
    result = ended([str(inside / "demo"), "--list"], folder=tmp_path, main=main)
    assert (result.status, result.err) == (0, "")
    printed = set(result.out + result.err)
    assert {c for c in printed if unicodedata.category(c) in ("Cc", "Cf", "Zl")} <= {"\n"}
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(inside)} == before
    assert not Path("/tmp/escape").exists()
    for path, content in written(inside / "demo").items():
        assert len(path.name.encode()) <= 210
        check_harmless(path, content.decode(errors="replace"))


def check_harmless(path: Path, text: str) -> None:
    if path.suffix in (".html", ".md", ".tex"):
        for part in ("<img src=x", "<svg onload", "<script>document"):
            assert part not in text, path
    if path.suffix in (".html", ".md", ".tex", ".csv"):
        assert not {"\x1b", "\x07", "\u202e"} & set(text), path
    if path.suffix == ".csv":
        cells = [cell.strip('"') for line in text.splitlines() for cell in line.split(",")]
        assert not [c for c in cells if c.startswith(("=1", "+cmd", "@SUM"))], path
