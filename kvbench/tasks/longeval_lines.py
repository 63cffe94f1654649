"""LongEval line retrieval: find one line's number in a long record of lines.

Protocol: D. Li*, R. Shao* et al., "How long can open-source LLMs truly promise on context length?"
(LMSYS, 2023), github.com/DachengLi1/LongChat, folder ``longeval``. A line is
``line <adjective>-<noun>: REGISTER_CONTENT is <number>`` with a number from 1 to 50000; the score is
whether the last run of digits in the answer equals the number of the line that was asked for.

Prompts are generated (word lists of `wonderwords`, every key once per record) or read from the
official test-case files. With ``repeats`` every line stands in the record several times, which makes
the cache redundant; the record is harder for a method the less redundant it is.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from kvbench.errors.options import Distinct, Whole
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Many, NewTokens, Repeats, Task, TaskError
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
    """The last run of digits as an integer, -1 where there is none (as the official scorer)."""
    runs = re.findall(r"\d+", text)
    if not runs:
        return -1
    try:
        return int(runs[-1])
    except ValueError:  # longer than Python converts (4,300 digits): no register holds it
        return -1


def _test_case(case: Any) -> dict[str, Any] | None:
    """A row of an official file with its numbers as integers; None if it is no such row."""
    try:
        prompt, (key, place) = case["prompt"], case["random_idx"]
        total = case.get("num_lines") or prompt.count(": REGISTER_CONTENT is <")
        expected, place, total = int(case["expected_number"]), int(place), int(total)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    texts = (prompt, key, case.get("correct_line") or "")
    if not all(isinstance(text, str) for text in texts) or not 0 <= place < max(1, total):
        return None
    numbers = {"expected_number": expected, "random_idx": (key, place), "num_lines": total}
    return {**case, **numbers}


@dataclass(frozen=True, kw_only=True)
class LongEvalLines(Task):
    """Line retrieval, by number of lines.

    Attributes:
        num_lines: numbers of (different) lines per record. Each is a dataset of its own, as each
            official file is: a stratum of every interval and average.
        num_examples: examples per number of lines.
        seed: of the generated records.
        number_range: smallest and largest number of a line.
        repeats: how often every line stands in the record; the copies are shuffled.
        files: official JSON-lines files to read in place of generating.
        max_new_tokens: generation limit (100 in the official evaluation).
        stop: generation ends at one of these strings; the official evaluation has none.
    """

    name: ClassVar[str] = "longeval_lines"
    version: ClassVar[int] = 2
    breakdown: ClassVar[tuple[str, ...]] = ("num_lines",)
    heatmap: ClassVar[tuple[str, str] | None] = ("num_lines", "depth")

    num_lines: Distinct[Annotated[int, Ge(1), Le(MAX_LINES)]] = (20, 50, 100, 200)
    num_examples: Many = 50
    seed: int = 0
    number_range: tuple[Whole, Whole] = (1, 50000)
    repeats: Repeats = 1
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
        """sha256 of each official file, by file name."""
        return file_digests(self.files)

    def metric_name(self) -> str:
        """See `Task.metric_name`."""
        return "right number"

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Round robin over the lengths (or files), so that every prefix is balanced."""
        del encoder
        if self.files:
            groups = [self._read(Path(file)) for file in self.files]
            names = [Path(file).stem for file in self.files]
            if len(set(names)) != len(names):
                raise TaskError(
                    f"longeval_lines: files={list(self.files)} repeat a file name; "
                    "file names must differ, they make the example ids"
                )
        else:
            groups = [
                [self._generate(lines, number) for number in range(self.num_examples)]
                for lines in self.num_lines
            ]
        longest = max(len(group) for group in groups)
        return [group[turn] for turn in range(longest) for group in groups if turn < len(group)]

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """1 if the last run of digits is the expected number."""
        return {"score": float(parse_number(prediction) == int(example.answers[0]))}

    def _generate(self, lines: int, number: int) -> Example:
        adjectives, nouns = words_of("adjective"), words_of("noun")
        rng = random.Random(f"kvbench longeval_lines {self.seed} {lines} {number}")
        keys: dict[str, int] = {}
        low, high = self.number_range
        while len(keys) < lines:
            key = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
            keys.setdefault(key, rng.randint(low, high))
        key = list(keys)[rng.randrange(lines)]
        order = list(keys)
        if self.repeats > 1:
            order = order * self.repeats
            rng.shuffle(order)
        record = "".join(LINE.format(key=name, number=keys[name]) for name in order)
        return self._example(
            f"lines{lines}-{number:04d}",
            f"{lines} lines",
            (INTRODUCTION + record, QUESTION.format(key=key)),
            keys[key],
            (key, order.index(key)),
            num_lines=lines,
            total=len(order),
        )

    def _read(self, path: Path) -> list[Example]:
        if not path.is_file():
            raise TaskError(
                f"longeval_lines: no file {path}; the official ones come with: git clone "
                "https://github.com/DachengLi1/LongChat (longeval/evaluation/lines/testcases)"
            )
        examples: list[Example] = []
        for line, row in file_rows("longeval_lines", str(path)):
            case = _test_case(row)
            if case is None:
                raise TaskError(
                    f"longeval_lines: {path} line {line} is not a test case "
                    "(JSON with prompt, expected_number, random_idx)"
                )
            prompt, total = case["prompt"], case["num_lines"]
            cut = prompt.rfind(QUESTION_START)
            if cut < 0:
                raise TaskError(
                    f"longeval_lines: {path} line {line} has no "
                    f"{QUESTION_START.strip()!r} after a blank line; only the lines task is read"
                )
            example = self._example(
                f"{path.stem}-{len(examples):04d}",
                path.stem,
                (prompt[:cut], prompt[cut:]),
                case["expected_number"],
                case["random_idx"],
                num_lines=total,
                total=total,
                line=case.get("correct_line"),
            )
            examples.append(example)
        if not examples:
            raise TaskError(f"longeval_lines: {path} holds no test case; JSON lines expected")
        return examples

    def _example(
        self,
        id: str,
        dataset: str,
        prompt: tuple[str, str],
        number: int,
        asked: tuple[str, int],
        *,
        num_lines: int,
        total: int,
        line: str | None = None,
    ) -> Example:
        """An example about a line `asked` (key, place) among `total`."""
        key, place = asked
        line = line or LINE.format(key=key, number=number)
        return Example(
            id=id,
            context=prompt[0],
            question=prompt[1],
            answers=(str(number),),
            max_new_tokens=self.max_new_tokens,
            dataset=dataset,
            stop=tuple(self.stop),
            evidence=line.strip(),
            fields={
                "num_lines": num_lines,
                "depth": int(10 * round(10.0 * place / max(1, total - 1))),
                "repeats": 1 if self.files else self.repeats,
                "line_key": key,
                "line_place": place,
                "expected_number": number,
                "correct_line": line,
            },
        )
