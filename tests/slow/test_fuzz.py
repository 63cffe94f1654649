"""Any command line, data file or results folder is a correct run or an error of one line: never a
traceback, never a silently skipped row."""

from __future__ import annotations

import json
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.cli_cases import BASE, command_lines, ended
from support.jobs import Letters
from support.report_runs import LINES_META, write_run

from kvbench.records.read import MANIFEST
from kvbench.report.__main__ import main
from kvbench.tasks import longbench
from kvbench.tasks.base import Example, PromptEncoder, TaskError
from kvbench.tasks.jsonl import Jsonl
from kvbench.tasks.longeval_lines import QUESTION_START, LongEvalLines
from kvbench.tasks.needle import Needle

COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}


def tried(strategy: Any, check: Callable[[Any], None], count: int) -> None:
    settings(max_examples=count, derandomize=count < 100, **COMMON)(given(strategy)(check))()


def often(count: int, slow: int) -> Any:
    return pytest.mark.parametrize("count", [count, pytest.param(slow, marks=pytest.mark.slow)])


@often(15, 500)
def test_any_command_line(count: int) -> None:
    def check(arguments: list[str]) -> None:
        found = ended(arguments)
        problem = found.problem()
        assert problem is None, f"{problem}: kvbench {arguments}\n{found.err[-3000:]}"

    tried(command_lines(), check, count)


@pytest.mark.parametrize("name", ["../../escape", "/tmp/escape", "~/escape"])
def test_no_name_leads_out_of_the_results_folder(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    base = [word for word in BASE if not word.startswith("dry_run")]
    base += ["method=exact", "task=longeval_lines", "task.num_lines=[5]", "task.max_new_tokens=1"]
    for key in ("experiment_name", "task_label", "model.name"):
        assert ended([*base, f"{key}={name}"], folder=inside).problem() is None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]
    assert not Path("/tmp/escape").exists()


# Data files.


class Bytes(Letters):
    """A tokenizer whose tokens are bytes, strict about what is text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte + 3 for byte in text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(i - 3 for i in token_ids if i >= 3).decode(errors="replace")


ENCODER = PromptEncoder(Bytes())
ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, 10**400, 1e308, float("nan"), float("inf"), "", "x", "0.25"),
    *("=1+1", "$a$ b$", "\x1b[31mred", "\u202eabc", "\x00", "a\nb", "a|b", "é" * 300, "x" * 10**6),
    *("../../x", "%s{}", "[/bold]", "score", "variant", "<script>", "\ud800", "\u2028"),
    *([], {}, [1], [None], [[1]], {"a": {"b": [1]}}, {"mean": 10**400}, [{"kind": "heatmap"}]),
]
LINE = {
    "prompt": f"line a-b: REGISTER_CONTENT is <17>\n{QUESTION_START}Which? ",
    "expected_number": 17,
    "random_idx": ["a-b", 0],
    "correct_line": "line a-b: REGISTER_CONTENT is <17>",
    "num_lines": 1,
}
ROW = {"_id": "0a", "context": "Some text.", "input": "What?", "answers": ["Some"], "length": 2}
ROW |= {"all_classes": None, "dataset": "hotpotqa", "language": "en"}
NEEDLE = {"needle": "The key is 5.", "question": "Which key?", "answer": "5", "lengths": [128]}


@st.composite
def files_like(draw: st.DrawFn, row: Mapping[str, Any]) -> bytes:
    """A JSON-lines file of a few rows, most of them like `row`, then damaged in one way or none."""
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        fields = dict(row)
        for name in draw(st.lists(st.sampled_from([*row, "other"]), max_size=2)):
            fields[name] = draw(st.sampled_from(ODD))
            if draw(st.booleans()):
                del fields[name]
        lines.append(json.dumps(fields, ensure_ascii=draw(st.booleans())))
    content = ("\n".join(lines) + "\n").encode(errors="surrogatepass")
    place = draw(st.integers(0, len(content)))
    damages = [content, content, content[:place], content.replace(b"\n", b"\r\n")]
    damages += [content[:place] + b"\xff\0{" + content[place:], b"\xef\xbb\xbf" + content]
    damages += [b"[" * 20_000 + b"\n" + content, b"", b"\n\n"]
    return draw(st.sampled_from(damages))


def lines_of(file: Path) -> Sequence[Example]:
    return LongEvalLines(files=[str(file)]).examples(ENCODER)


def rows_of(file: Path) -> Sequence[Example]:
    fields = {"context": "context", "question": "input", "answers": "answers"}
    return Jsonl(files=[str(file)], fields=fields).examples(ENCODER)


def texts_of(file: Path) -> Sequence[Example]:
    how: dict[str, Any] = {"depths": [0, 50], "num_examples": 1, "haystack": "files"}
    return Needle(**NEEDLE, **how, haystack_files=str(file)).examples(ENCODER)


def longbench_of(file: Path) -> Sequence[Example]:
    for row in longbench.rows_of(longbench.source_of("hotpotqa", str(file.parent)), "hotpotqa"):
        assert row["answers"]
        assert all(isinstance(answer, str) for answer in row["answers"])
    return ()


READERS: dict[Callable[[Path], Sequence[Example]], Mapping[str, Any]] = {
    lines_of: LINE, rows_of: ROW, texts_of: ROW, longbench_of: ROW,
}  # fmt: skip


@pytest.mark.parametrize("read", READERS)
@often(25, 400)
def test_any_data_file(read: Callable[[Path], Sequence[Example]], count: int) -> None:
    def check(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "hotpotqa.jsonl"
            path.write_bytes(content)
            examples: Sequence[Example] = ()
            refused = ""
            try:
                examples = read(path)
                for each in examples:
                    ENCODER.encode_text(each.context)
                    json.dumps(each.fields)
            except TaskError as error:
                refused = str(error)
                assert any(
                    word in refused for word in ("hotpotqa", "needle: ", "jsonl: ", "half a")
                )
            assert "\n" not in refused
            assert all(isinstance(answer, str) for each in examples for answer in each.answers)
            if read in (lines_of, rows_of) and not refused:
                text = content.decode("utf-8-sig")
                rows = [
                    sum(map(bool, map(str.strip, p))) for p in (text.split("\n"), text.splitlines())
                ]
                assert len(examples) in rows, "a row was skipped"

    tried(files_like(READERS[read]), check, count)


# Results folders.


def places(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*prefix, key)
            yield from places(inner, (*prefix, key))


@often(12, 100)
def test_any_damaged_results(count: int) -> None:
    """Up to three odd values somewhere in records and manifests."""
    damage = st.tuples(st.booleans(), st.integers(0, 10**6), st.sampled_from(ODD))

    def check(damages: list[tuple[bool, int, Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for method in ("exact", "balancekv"):
                records = [
                    {"example_id": f"e{i}", "num_lines": i % 2, "score": 0.5} for i in (0, 1, 2)
                ]
                run = write_run(
                    Path(folder), task="t", method=method, records=records, task_meta=LINES_META
                )
            for of_manifest, place, odd in damages:
                path = run / (MANIFEST if of_manifest else "records.jsonl")
                head, _, rest = path.read_text().partition("\n" if not of_manifest else "\0")
                content = json.loads(head)
                *above, last = (paths := list(places(content)))[place % len(paths)]
                inner = content
                for part in above:
                    inner = inner[part]
                inner[last] = odd
                path.write_text(json.dumps(content) + "\n" + rest)
            found = ended([str(Path(folder) / "demo")], main=main)
            problem = found.problem()
            assert problem is None, f"{problem}: {damages!r:.2000}\n{found.err[-3000:]}"
            shown = (found.out + found.err).replace("\n", "")
            assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf")]

    tried(st.lists(damage, min_size=1, max_size=3), check, count)
