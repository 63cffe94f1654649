"""LongEval line retrieval: find one line's number in a long record of lines.

Protocol: D. Li*, R. Shao* et al., "How long can open-source LLMs truly promise on context length?"
(LMSYS, 2023), github.com/DachengLi1/LongChat, folder ``longeval``. A line is
``line <adjective>-<noun>: REGISTER_CONTENT is <number>`` with a number from 1 to 50000; the score is
whether the last run of digits in the answer equals the number of the line that was asked for.

Prompts are generated (from the word lists of `wonderwords`, every key once per record) or read from
the official test-case files. With ``repeats`` every line stands in the record several times, so that
the cache is redundant and easier to compress.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from annotated_types import Ge, Le

from kvbench.errors.options import Distinct, Whole
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import (
    Example,
    Many,
    NewTokens,
    Task,
    TaskError,
    depth_in_tens,
    in_turn,
)
from kvbench.tasks.data import file_digests, file_rows
from kvbench.tasks.words import words_of

INTRODUCTION = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' "
    "and contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each "
    "line index, memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will "
    "ask you to retrieve the corresponding <REGISTER_CONTENT> of a certain line index. Now the "
    "record start:\n\n"
)
LINE = "line {key}: REGISTER_CONTENT is <{number}>\n"
QUESTION_START = "\nNow the record is over. "
QUESTION = (
    QUESTION_START + "Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number. "
)
MAX_LINES = 100_000


def parse_number(text: str) -> int:
    """The last run of digits of a text as an integer, as the official scorer reads it; -1 where there
    is none."""
    runs = re.findall(r"\d+", text)
    if not runs:
        return -1
    try:
        return int(runs[-1])
    except ValueError:
        # Python converts at most 4,300 digits; no line has such a number.
        return -1


class LineCase(NamedTuple):
    """A record of lines and a question about one of them: the one with this key and number, at `place`.
    `total` counts repeated lines, `num_lines` does not."""

    record: str
    question: str
    key: str
    place: int
    number: int
    line: str
    num_lines: int
    total: int


def _official_case(row: Any) -> LineCase | None:
    """None if the row is in another format. The question is empty where the prompt has none as the lines
    task asks it."""
    try:
        prompt, (key, place) = row["prompt"], row["random_idx"]
        num_lines = int(row.get("num_lines") or prompt.count(": REGISTER_CONTENT is <"))
        number, place = int(row["expected_number"]), int(place)
        line = row.get("correct_line") or ""
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    if not all(isinstance(text, str) for text in (prompt, key, line)):
        return None
    if not 0 <= place < max(1, num_lines):
        return None
    cut = prompt.rfind(QUESTION_START)
    record, question = (prompt[:cut], prompt[cut:]) if cut >= 0 else (prompt, "")
    line = line or LINE.format(key=key, number=number)
    return LineCase(record, question, key, place, number, line, num_lines, num_lines)


@dataclass(frozen=True, kw_only=True)
class LongEvalLines(Task):
    """Line retrieval. Each number of different lines is a data set of its own, as each official file is,
    and so a stratum of every interval and average. conf/task/longeval_lines.yaml tells the options; the
    official evaluation has 100 new tokens and no strings that end an answer."""

    name: ClassVar[str] = "longeval_lines"
    version: ClassVar[int] = 2
    breakdown: ClassVar[tuple[str, ...]] = ("num_lines",)
    heatmap: ClassVar[tuple[str, str] | None] = ("num_lines", "depth")

    num_lines: Distinct[Annotated[int, Ge(1), Le(MAX_LINES)]] = (20, 50, 100, 200)
    num_examples: Many = 50
    seed: int = 0
    number_range: tuple[Whole, Whole] = (1, 50000)
    repeats: Annotated[int, Ge(1), Le(1000)] = 1
    files: Sequence[str] = ()
    max_new_tokens: NewTokens = 100
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        first, last = self.number_range
        if first > last:
            raise TaskError(
                f"task.number_range is {list(self.number_range)}; allowed: the smallest number first"
            )

    def digests(self) -> Mapping[str, str]:
        return file_digests(self.files)

    def metric_name(self) -> str:
        return "right number"

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        del encoder
        if self.files:
            paths = [Path(file) for file in self.files]
            if len({path.stem for path in paths}) != len(paths):
                raise TaskError(
                    f"longeval_lines: files={list(self.files)} repeat a file name; "
                    "file names must differ, they make the example ids"
                )
            groups = [self._read(path) for path in paths]
        else:
            groups = [
                [self._generate(num_lines, number) for number in range(self.num_examples)]
                for num_lines in self.num_lines
            ]
        return in_turn(groups)

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """1 if the last run of digits is the expected number."""
        return {"score": float(parse_number(prediction) == int(example.answers[0]))}

    def _generate(self, num_lines: int, number: int) -> Example:
        adjectives, nouns = words_of("adjective"), words_of("noun")
        rng = random.Random(f"kvbench longeval_lines {self.seed} {num_lines} {number}")
        numbers: dict[str, int] = {}
        low, high = self.number_range
        while len(numbers) < num_lines:
            key = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
            numbers.setdefault(key, rng.randint(low, high))
        keys = list(numbers)
        key = keys[rng.randrange(num_lines)]
        if self.repeats > 1:
            keys = keys * self.repeats
            rng.shuffle(keys)
        lines = [LINE.format(key=key_of_line, number=numbers[key_of_line]) for key_of_line in keys]
        place = keys.index(key)
        case = LineCase(
            record=INTRODUCTION + "".join(lines),
            question=QUESTION.format(key=key),
            key=key,
            place=place,
            number=numbers[key],
            line=lines[place],
            num_lines=num_lines,
            total=len(lines),
        )
        return self._example(f"lines{num_lines}-{number:04d}", f"{num_lines} lines", case)

    def _read(self, path: Path) -> list[Example]:
        if not path.is_file():
            raise TaskError(
                f"longeval_lines: no file {path}; the official ones come with: git clone "
                "https://github.com/DachengLi1/LongChat (longeval/evaluation/lines/testcases)"
            )
        examples: list[Example] = []
        for line, row in file_rows("longeval_lines", path):
            case = _official_case(row)
            if case is None:
                raise TaskError(
                    f"longeval_lines: {path} line {line} is not a test case "
                    "(JSON with prompt, expected_number, random_idx)"
                )
            if not case.question:
                raise TaskError(
                    f"longeval_lines: {path} line {line} has no "
                    f"{QUESTION_START.strip()!r} after a blank line; only the lines task is read"
                )
            examples.append(self._example(f"{path.stem}-{len(examples):04d}", path.stem, case))
        if not examples:
            raise TaskError(f"longeval_lines: {path} holds no test case; JSON lines expected")
        return examples

    def _example(self, label: str, dataset: str, case: LineCase) -> Example:
        return Example(
            id=label,
            context=case.record,
            question=case.question,
            answers=(str(case.number),),
            max_new_tokens=self.max_new_tokens,
            dataset=dataset,
            stop=tuple(self.stop),
            evidence=case.line.strip(),
            fields={
                "num_lines": case.num_lines,
                "depth": depth_in_tens(case.place, case.total - 1),
                "repeats": 1 if self.files else self.repeats,
                "line_key": case.key,
                "line_place": case.place,
                "expected_number": case.number,
                "correct_line": case.line,
            },
        )
