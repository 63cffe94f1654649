"""Sources of data: files, folders, archives, the Hub, and the errors where they are missing or wrong."""

from __future__ import annotations

import gzip
import json
import logging
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.encoders import shipped
from support.paths import write_lines

from kvbench.lm_eval.task import HarnessTask
from kvbench.probes.fidelity import FidelityProbe
from kvbench.tasks.base import Task, TaskError
from kvbench.tasks.data import Source, file_digests, texts_of_files
from kvbench.tasks.jsonl import Jsonl
from kvbench.tasks.longeval_lines import LongEvalLines
from kvbench.tasks.needle import Needle
from kvbench.tasks.ruler import Ruler
from kvbench.tasks.text import RunningText

ROWS = [{"text": f"Text {i}. It says little!", "n": i} for i in range(3)]


def rows_of(**where: Any) -> list[Any]:
    return [dict(row) for _, _, row in Source("t", **where).rows()]


def test_files_folders_archives_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    import pandas as pd

    file = tmp_path / "deep" / "my.jsonl"
    write_lines(file, ROWS)
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(file, "inside/my.jsonl")
    (tmp_path / "parts" / "my").mkdir(parents=True)
    pd.DataFrame(ROWS).to_parquet(tmp_path / "parts" / "my" / "test-00000.parquet")
    for where in (
        {"files": (str(file),)},
        {"files": (str(tmp_path / "**/*.jsonl"),)},
        {"files": (str(tmp_path / "list.json"),)},
        {"data": str(tmp_path / "deep"), "file": "data/my.jsonl"},
        {"data": str(tmp_path), "file": "deep/my.jsonl"},
        {"data": str(tmp_path / "data.zip"), "file": "my.jsonl"},
        {"data": str(tmp_path / "parts"), "file": "my.jsonl"},
    ):
        assert rows_of(**where) == ROWS, where
    zipped = Source("t", data=str(tmp_path / "data.zip"), file="my.jsonl")
    assert zipped.digests() == file_digests([str(file)])
    write_lines(file, ROWS[:1])
    assert zipped.digests() != file_digests([str(file)])


def parquet(rows: list[Any]) -> bytes:
    import pandas as pd

    return bytes(pd.DataFrame(rows).to_parquet())


TABLE = [{"text": "Tëxt,\u2028\n1", "n": "007"}, {"text": "2009-01-02", "n": "NA"}]
LINES = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in TABLE).encode()
CSV = 'text,n\r\n"Tëxt,\u2028\n1",007\r\n2009-01-02,NA\r\n'.encode()
FORMATS = {  # by the file's name, its content
    "my.jsonl": LINES,
    "MY.JSONL": b"\xef\xbb\xbf" + LINES,
    "lines.json": LINES,
    "list.Json": b"\xef\xbb\xbf" + json.dumps(TABLE, indent=1).encode(),
    "my.jsonl.gz": gzip.compress(LINES),
    "my.csv": CSV,
    "MY.CSV": b"\xef\xbb\xbf" + CSV,
    "my.CSV.GZ": gzip.compress(CSV),
    "my.tsv": CSV.replace(b",00", b"\t00").replace(b",NA", b"\tNA").replace(b"text,", b"text\t"),
    "my.Parquet": parquet(TABLE),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_read_by_its_ending_and_a_folder_by_its_files(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / "a" / name, tmp_path / "b" / ".cache" / name, tmp_path / "b" / "x.md"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(FORMATS[name])
    (tmp_path / "b" / name).write_bytes(FORMATS[name])
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr(f"in/{name}", FORMATS[name])
    places: list[Any] = [{"files": (str(tmp_path / place),)} for place in (f"a/{name}", "b")]
    for where in (*places, {"data": str(tmp_path / "z.zip"), "file": name}):
        assert rows_of(**where) == TABLE
    stems = {stem for _, stem, _ in Source("t", **places[0]).rows()}
    assert {stem.lower() for stem in stems} <= {"my", "lines", "list"}


def test_of_a_folder_with_splits_one_is_read(tmp_path: Path) -> None:
    for name in ("data/train-0.jsonl", "data/test-0.jsonl", "test/1.jsonl", "latest.jsonl"):
        write_lines(tmp_path / name, [{"name": name}])
    read = [row["name"] for row in rows_of(files=(str(tmp_path),))]
    assert read == ["data/test-0.jsonl", "test/1.jsonl"]
    with pytest.raises(TaskError, match=r"has files of test, train and task\.split is 'dev'"):
        rows_of(files=(str(tmp_path),), split="dev")
    write_lines(tmp_path / "saved" / "dataset_info.json", [{}])
    (tmp_path / "saved" / "data-0.arrow").touch()
    with pytest.raises(TaskError, match="saved was written by save_to_disk; allowed: parq"):
        rows_of(files=(str(tmp_path / "saved"),))


def test_numbers_of_parquet_keep_their_digits_and_gaps_are_none(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"n": [2**60 + 1, None], "x": [4711.0, float("nan")]})
    pq.write_table(table, tmp_path / "my.parquet")
    rows = rows_of(files=(str(tmp_path / "my.parquet"),))
    assert rows == [{"n": 2**60 + 1, "x": 4711.0}, {"n": None, "x": None}]


@pytest.fixture
def namesakes(tmp_path: Path) -> list[Path]:
    files = [tmp_path / folder / "test.jsonl" for folder in "ab"]
    for file in files:
        write_lines(file, [{"context": "c", "question": "q", "answers": file.parent.name}])
    return files


def data_of(task: Any) -> Any:
    """The part of a run's identity that says which data it read."""
    return task.digests() if isinstance(task, Task) else task.meta()["data"]


NEEDLE: Any = {"needle": "n", "question": "q", "answer": "a"}
READERS: dict[str, Any] = {  # a task or a probe that reads all these files
    "jsonl": lambda files: Jsonl(files=files),
    "jsonl, subsets": lambda files: Jsonl(
        data=str(Path(files[0]).parents[1]), subsets={"x": {"file": "*/test.jsonl"}}
    ),
    "needle": lambda files: Needle(haystack_files=files, **NEEDLE),
    "text": lambda files: RunningText(files=files),
    "lines": lambda files: LongEvalLines(files=files),
    "ruler": lambda files: Ruler(tasks=["qa_1", "qa_2"], squad=files[0], hotpotqa=files[1]),
    "fidelity": lambda files: FidelityProbe(prompts=RunningText(files=files)),
    "lm_eval": lambda files: HarnessTask(tasks=["a"], include_path=str(Path(files[0]).parents[1])),
}


@pytest.mark.parametrize("reader", READERS)
def test_data_are_told_apart_by_the_content_of_every_file(
    reader: str, namesakes: list[Path]
) -> None:
    """A changed answer in either of two files of one name, and the two exchanged, are other data;
    files that lie elsewhere are not."""
    files = [str(file) for file in namesakes]
    contents = [file.read_text() for file in namesakes]
    seen = []
    for texts in (contents, ["{}", contents[1]], [contents[0], "{}"], contents[::-1], contents):
        for file, text in zip(namesakes, texts, strict=True):
            file.write_text(text)
        seen.append(data_of(READERS[reader](files)))
    assert len({json.dumps(data, sort_keys=True) for data in seen}) == 4
    assert seen[0] == seen[-1]
    moved = namesakes[0].parents[1] / "elsewhere"
    moved.mkdir()
    for file in namesakes:
        file.parent.rename(moved / file.parent.name)
    files = [str(moved / file.parent.name / file.name) for file in namesakes]
    assert data_of(READERS[reader](files)) == seen[0]


def test_files_of_one_name_are_texts_and_data_sets_of_their_own(namesakes: list[Path]) -> None:
    files = [str(file) for file in namesakes]
    texts = texts_of_files("files", files)
    assert [name for name, _ in texts] == ["a/test.jsonl", "b/test.jsonl"]
    examples = RunningText(files=files, tokens=8).examples(shipped())
    assert {example.fields["text"] for example in examples} == {"a/test.jsonl", "b/test.jsonl"}
    examples = Jsonl(files=files).examples(shipped())
    assert [example.dataset for example in examples] == ["a/test", "b/test"]
    assert [name for name, _ in texts_of_files("files", files[:1])] == ["test.jsonl"]
    assert list(Jsonl(files=files[:1]).digests()) == ["test.jsonl"]
    assert Jsonl(files=files).digests() != Jsonl(files=files[::-1]).digests()


REPOSITORY = {"dataset": "some/set", "archive": "data.zip", "file": "a.jsonl"}
REFUSED: list[tuple[dict[str, Any], bytes, str]] = [  # source, the file of that name, message
    (
        {"files": ("a.jsonl",)},
        b'{}\n{"text": "Te',
        r"line 2 is not complete JSON \(Unter.*: column 10\)",
    ),
    ({"files": ("a.jsonl",)}, b'{}\n{"a": "\xff"}', r"line 2 is not UTF-8 \(byte 7\)"),
    ({"files": ("a.jsonl",)}, b"[1]\n", "row 1 is not an object with fields"),
    ({"files": ("a.jsonl",)}, b"[" * 50_000, "line 1 is not complete JSON"),
    ({"files": ("a.json",)}, b"{}", "holds no list"),
    ({"files": ("a.parquet",)}, b"{}", "cannot read"),
    ({"files": ("a.csv",)}, b"a,b\nx,y,z\n", "cannot read a.csv: Length of header"),
    ({"files": ("a.csv",)}, b"a,b\nx,y\nx,y,z\n", "cannot read a.csv: .* line 3, saw 3"),
    ({"files": ("a.csv",)}, b'a,b\n"x,y\n', "cannot read a.csv: .*EOF inside string"),
    ({"files": ("a.csv",)}, b"a\n\xff\n", "a.csv is not UTF-8"),
    (
        {"files": ("a.csv",)},
        b"context;question;answers\nx, y;z;w\n",
        r"cells of a.csv are separated by ';'; allowed in a .csv file: ','",
    ),
    ({"files": ("a.tsv",)}, b"a,b\nx,y\n", r"by ','; allowed in a .tsv file: a tab"),
    ({"files": ("a.csv.gz",)}, gzip.compress(b"a,b\nx,y\n")[:-9], "cannot read a.csv.gz"),
    ({"files": ("x*.jsonl",)}, b"", r"no file matches files='x\*\.jsonl'"),
    (
        REPOSITORY | {"data": "."},
        b"",
        r"no a\.jsonl in .*: hf download some/set data\.zip --repo-type dataset",
    ),
    (REPOSITORY | {"data": "none"}, b"", "does not exist; allowed: a folder or zip with a.jsonl"),
    (REPOSITORY | {"data": "a.txt"}, b"x", "is no zip archive"),
]


@pytest.mark.parametrize(("where", "content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_or_missing_is_one_line(
    tmp_path: Path, monkeypatch: Any, capsys: Any, where: Any, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / (where.get("data") or where["files"][0])).write_bytes(content)
    with pytest.raises(TaskError, match=message) as caught:
        rows_of(**where)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("reached", [True, False])
def test_an_archive_of_the_hub_is_fetched_at_its_revision(
    tmp_path: Path, monkeypatch: Any, reached: bool
) -> None:
    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: reached)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/a.jsonl", json.dumps(ROWS[0]))
    requests = []

    def fetch(repository: str, name: str, **options: Any) -> str:
        requests.append((repository, name, *options.values()))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    where = REPOSITORY | {"file": "data/a.jsonl", "revision": "abc"}
    assert rows_of(**where) == ROWS[:1]
    assert requests == [("some/set", "data.zip", "dataset", "abc", not reached)]


def test_an_archive_that_cannot_be_fetched_is_one_line(monkeypatch: Any, caplog: Any) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
        raise OSError("no network\nat all")

    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    message = r"revision abc\): no network; allowed: a network, or task\.data=<"
    with caplog.at_level(logging.WARNING), pytest.raises(TaskError, match=message):
        rows_of(**REPOSITORY | {"revision": "abc"})
    assert not caplog.records, "the error is the only line"


@pytest.fixture
def requests(monkeypatch: Any) -> list[Any]:
    """What `datasets` is asked for by a Hub that answers with `ROWS`."""
    requests = []

    def load(path: str, *, name: Any, split: str, streaming: bool, revision: Any) -> list[Any]:
        requests.append((path, name, split, revision))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: True)
    return requests


def test_a_repository_is_read_by_datasets_where_the_hub_answers(requests: list[Any]) -> None:
    assert rows_of(dataset="some/set", config="x", revision="r") == ROWS
    assert Source("t", dataset="some/set", split="dev").hub_rows(2) == ROWS[:2]
    assert requests == [("some/set", "x", "test", "r"), ("some/set", None, "dev", None)]
    places = [(place, stem) for place, stem, _ in Source("t", dataset="some/set").rows()]
    assert places == [(f"some/set row {i}", "set") for i in (1, 2, 3)]


def test_texts_are_a_column_of_a_repository(requests: list[Any]) -> None:
    task = RunningText(dataset="some/set")
    assert task.texts("text", 2, 1)[0] == ("row 0", ROWS[0]["text"])
    with pytest.raises(
        TaskError, match="column is 'body', which some/set has not; allowed: text, n"
    ):
        replace(task, column="body").texts("text", 2, 1)


def test_datasets_is_not_called_where_the_hub_does_not_answer(
    requests: list[Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: False)
    with pytest.raises(TaskError, match=r"cannot be reached; allowed: a network, or task\.files="):
        rows_of(dataset="some/set", config="x")
    with pytest.raises(TaskError, match=r"cannot read 'some/set': the Hub cannot be reached"):
        Source("t", dataset="some/set").digests()
    assert requests == []
