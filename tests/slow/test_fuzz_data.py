"""Any data file is examples or an error of one line that names it: never a traceback, never a
silently skipped row."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.engine.sampling import GREEDY
from kvbench.kv import KVError
from kvbench.records.read import StoreError, load_runs
from kvbench.report.experiment import Experiment, group_runs
from kvbench.report.render.text import markdown
from kvbench.report.sections import tables_of
from kvbench.run.plan import TaskPlan, check_ids
from kvbench.tasks.base import Example, PromptEncoder, TaskError
from kvbench.tasks.longbench import rows_of, source_of
from kvbench.tasks.longeval_lines import QUESTION_START, LongEvalLines
from kvbench.tasks.needle import Needle

COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


class Bytes:
    """A tokenizer whose tokens are bytes, strict about what is text."""

    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte + 3 for byte in text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(i - 3 for i in token_ids if i >= 3).decode(errors="replace")


ENCODER = PromptEncoder(Bytes())

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(2**70), 1e308]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["\ud800", "\0", "\u2028", "../../x", "<script>", "1" * 5000]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def files_like(draw: st.DrawFn, row: Mapping[str, Any]) -> bytes:
    """A JSON-lines file of a few rows, most of them like `row`, then damaged in one way or none."""
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        fields = dict(row)
        for name in draw(st.lists(st.sampled_from([*row, "other"]), max_size=2)):
            if draw(st.booleans()):
                fields[name] = draw(JSON)
            else:
                fields.pop(name, None)
        lines.append(json.dumps(fields, ensure_ascii=draw(st.booleans())))
    content = ("\n".join(lines) + "\n").encode(errors="surrogatepass")
    damage = draw(
        st.sampled_from(["none", "none", "cut", "bytes", "swap", "brackets", "bom", "crlf"])
    )
    place = draw(st.integers(0, len(content)))
    if damage == "cut":
        return content[:place]
    if damage == "bytes":
        return content[:place] + draw(st.binary(min_size=1, max_size=8)) + content[place:]
    if damage == "swap":
        return draw(JSON.map(lambda value: json.dumps(value).encode())) + b"\n" + content
    if damage == "brackets":
        return b"[" * 20_000 + b"\n" + content
    if damage == "bom":
        return b"\xef\xbb\xbf" + content
    return content.replace(b"\n", b"\r\n") if damage == "crlf" else content


def lines_of(row: Mapping[str, Any], *changes: Mapping[str, Any]) -> list[bytes]:
    """A row as a line of a file, with each of the changes."""
    return [json.dumps({**row, **change}).encode() for change in changes]


def one_line(error: Exception, *names: str) -> None:
    assert "\n" not in str(error)
    assert any(name in str(error) for name in names), error


def whole_or_one_line(make: Callable[[], Sequence[Example]], name: str) -> list[Example] | None:
    """The examples, each fit for a prompt and a record; None after an error that names the file."""
    try:
        examples = list(make())
        for each in examples:
            ENCODER.encode_text(each.context)
            ENCODER.encode_text(each.question)
    except TaskError as error:
        one_line(error, name, "half a character")
        return None
    assert examples
    for each in examples:
        assert isinstance(each.id, str)
        assert each.answers
        assert all(isinstance(answer, str) for answer in each.answers)
        json.dumps(each.fields)
    return examples


LINE = {
    "prompt": f"line a-b: REGISTER_CONTENT is <17>\n{QUESTION_START}Which? ",
    "expected_number": 17,
    "random_idx": ["a-b", 0],
    "correct_line": "line a-b: REGISTER_CONTENT is <17>",
    "num_lines": 1,
}


def lines_task(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case_lines.jsonl"
        path.write_bytes(content)
        task = LongEvalLines(files=[str(path)])
        found = whole_or_one_line(lambda: task.examples(ENCODER), "case_lines.jsonl")
        if found is not None:
            rows = [row for row in content.decode().splitlines() if row.strip()]
            text_lines = [row for row in content.decode().split("\n") if row.strip()]
            assert len(found) in (len(rows), len(text_lines)), "a row was skipped"
            for each in found:
                assert task.score("17", each)["score"] in (0.0, 1.0)


BAD_LINES = [
    *lines_of(
        LINE,
        {"prompt": 3},
        {"prompt": None},
        {"random_idx": ["a", 1e400]},
        {"random_idx": [["a"], 0]},
        {"random_idx": ["a", -3]},
        {"num_lines": "many"},
        {"expected_number": 1e400},
        {"prompt": "\ud800" + LINE["prompt"]},
    ),
    *(b"", b"\n\n", json.dumps([LINE]).encode(), b"[" * 100_000, b"\xff\xfe"),
]


@pytest.mark.parametrize("content", BAD_LINES, ids=range(len(BAD_LINES)))
def test_lines_that_are_no_test_case_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "1_lines.jsonl"
    path.write_bytes(content)
    found = whole_or_one_line(lambda: LongEvalLines(files=[str(path)]).examples(ENCODER), path.name)
    assert found is None


def needle_task(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "essay.txt"
        path.write_bytes(content)
        task = Needle(
            needle="The key is 5.",
            question="Which key?",
            answer="5",
            lengths=[128],
            depths=[0, 50],
            num_examples=1,
            haystack="files",
            haystack_files=str(Path(folder) / "*.txt"),
        )
        try:
            examples = task.examples(ENCODER)
        except TaskError as error:
            one_line(error, "needle: ")
            return
        assert len(examples) == 2
        for each in examples:
            assert each.context_ids is not None
            assert each.question_ids is not None
            assert len(each.context_ids) + len(each.question_ids) == 128


ESSAYS = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=300).map(lambda text: text.encode(errors="replace")),
    st.text("a. \n!?é", max_size=300).map(str.encode),
)


LONGBENCH = {
    "_id": "0a",
    "context": "Some text.",
    "input": "What?",
    "answers": ["Some"],
    "length": 2,
    "all_classes": None,
    "dataset": "hotpotqa",
    "language": "en",
}


def longbench_rows(content: bytes, stem: str) -> None:
    """Every row of a LongBench file, or a line that names the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{stem}.jsonl"
        path.write_bytes(content)
        try:
            rows = rows_of(source_of(stem, folder), stem)
        except TaskError as error:
            one_line(error, path.name, stem)
            return
        lines = [line for line in content.splitlines() if line.strip()]
        assert len(rows) == len(lines), "a row was skipped"
        for row in rows:
            assert row["answers"]
            assert all(isinstance(answer, str) for answer in row["answers"])


BAD_ROWS = [
    *lines_of(LONGBENCH, {"answers": []}, {"answers": None}, {"context": 3}),
    *(b"", json.dumps(LONGBENCH).encode()[:-9], b"[" * 50_000),
    json.dumps(LONGBENCH).encode().replace(b"Some", b"\xff\xfe"),
]


@pytest.mark.parametrize("content", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_longbench_files_that_are_none_are_refused_by_name(content: bytes) -> None:
    longbench_rows(content, "hotpotqa")
    if content:
        longbench_rows(json.dumps(LONGBENCH | {"_id": "0b"}).encode() + b"\n" + content, "trec")


def test_null_classes_are_fine_where_no_class_is_asked_for() -> None:
    longbench_rows(json.dumps(LONGBENCH).encode() + b"\n", "hotpotqa")


def test_json_lines_are_read_without_the_reader_that_broken_files_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow's, alone or inside `datasets`: some files ended the process there."""
    import datasets
    import pyarrow.json
    from datasets.packaged_modules.json.json import Json

    def crash(*_: Any, **__: Any) -> None:
        raise AssertionError("another reader of JSON")

    monkeypatch.setattr(pyarrow.json, "read_json", crash)
    monkeypatch.setattr(pyarrow.json, "open_json", crash)
    monkeypatch.setattr(Json, "_generate_tables", crash)
    monkeypatch.setattr(datasets, "load_dataset", crash)
    content = json.dumps(LONGBENCH).encode() + b"\n"
    (tmp_path / "hotpotqa.jsonl").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/hotpotqa.jsonl", content)
    for place in (tmp_path, tmp_path / "data.zip"):
        (row,) = rows_of(source_of("hotpotqa", str(place)), "hotpotqa")
        assert row["_id"] == "0a"
    for bad in BAD_ROWS:
        longbench_rows(bad, "hotpotqa")
    (tmp_path / "1_lines.jsonl").write_text(json.dumps(LINE))
    assert len(LongEvalLines(files=[str(tmp_path / "1_lines.jsonl")]).examples(ENCODER)) == 1


def test_two_examples_of_one_id_are_refused() -> None:
    """The second would be taken for done."""

    class Twice(LongEvalLines):
        def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
            return [*super().examples(encoder)] * 2

    class Session:
        encoder = ENCODER
        spec = None
        prefill = "shared"
        compress_after = "prompt"
        sampling = GREEDY

    session: Any = Session()
    plan = TaskPlan(Twice(num_lines=[5], num_examples=1))
    with pytest.raises(KVError, match="longeval_lines has 2 examples with the id 'lines5-0000'"):
        plan.units(session, {})
    (unit,) = TaskPlan(LongEvalLines(num_lines=[5], num_examples=1)).units(session, {})
    check_ids("lines", [unit])
    with pytest.raises(KVError, match="task lines has 2 examples with the id 'lines5-0000'"):
        check_ids("lines", [unit, unit])


def results_folder(records: bytes, manifest: bytes) -> None:
    """A results folder from elsewhere is read or named."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "model" / "task" / "m-00000000"
        run.mkdir(parents=True)
        (run / "records.jsonl").write_bytes(records)
        (run / "manifest.json").write_bytes(manifest)
        try:
            runs = load_runs(folder)
            for table in tables_of(
                Experiment("e", Path(folder), tuple(runs), tuple(group_runs(runs)))
            ):
                markdown(table)
        except StoreError as error:
            one_line(error, "m-00000000")


def _record() -> dict[str, Any]:
    from support.stores import make_record

    return make_record("a", dataset="d", prompt_tokens=3, prediction="x", answers=["x"])


def _manifest() -> dict[str, Any]:
    figures = [{"kind": "heatmap", "x": "depth", "y": "length", "value": "score"}]
    meta = {"version": 1, "score_unit": "fraction", "breakdown": ["depth"], "figures": figures}
    names = {"experiment": "e", "model": "m", "task": "t", "method": "exact", "config_hash": "0"}
    config = {"budget": {"rate": 0.25}, "methods": {"exact": {}}, "paper_table": None}
    return names | {
        "seed": 0,
        "identity": config,
        "config": config,
        "task_meta": meta,
        "earlier_starts": [],
        **{f"task_meta.{key}": value for key, value in meta.items()},  # what damage may be put in
    }


def _nested(content: bytes) -> bytes:
    """A manifest whose ``a.b`` is put as b into a, where it is one."""
    try:
        manifest = json.loads(content)
        for key in [key for key in manifest if "." in key]:
            above, _, last = key.partition(".")
            manifest[above][last] = manifest.pop(key)
        return json.dumps(manifest).encode()
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return content


RECORD_FILES = files_like(
    _record() | {"depth": 0, "length": 5, "score": 1.0, "entries": {"mean": 1.0}}
)
MANIFESTS = st.one_of(
    st.just(b"{}"),
    files_like(_manifest()).map(lambda lines: _nested(lines.split(b"\n")[0])),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.binary(),
)
KINDS: dict[str, tuple[Callable[..., None], list[st.SearchStrategy[Any]]]] = {
    "lines": (lines_task, [files_like(LINE)]),
    "haystacks": (needle_task, [ESSAYS]),
    "longbench": (longbench_rows, [files_like(LONGBENCH), st.sampled_from(["hotpotqa", "trec"])]),
    "results": (results_folder, [RECORD_FILES, MANIFESTS]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_any_file_is_read_or_one_line(kind: str, count: int) -> None:
    check, given_files = KINDS[kind]
    settings(max_examples=count, derandomize=count == 30, **COMMON)(given(*given_files)(check))()


HAYSTACKS = [b"", b" \n\t ", b"no sentence ends here " * 500_000, b"\xff", b"a"]


def test_a_line_of_megabytes() -> None:
    lines_task(json.dumps(LINE | {"prompt": "x" * 10_000_000 + str(LINE["prompt"])}).encode())


@pytest.mark.parametrize("content", HAYSTACKS, ids=len)
def test_haystacks_that_hardly_are_any(content: bytes) -> None:
    needle_task(content)
