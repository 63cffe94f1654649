"""RULER as a task.

C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv
2404.06654; github.com/NVIDIA/RULER at c3f5e3b4 (Apache-2.0). Templates, settings and scores are its
own. Prompts are sized by a search of ours, which ends, takes off single units (theirs takes off steps,
and a sample that misses by one token loses up to 500 words) and counts every token that the model sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from kvbench.errors import nearest
from kvbench.errors.options import Distinct
from kvbench.tasks.base import Example, PromptEncoder, Task, TaskError
from kvbench.tasks.encoding import SplitIds, encode_split, largest_fitting
from kvbench.tasks.files import digests_of
from kvbench.tasks.options import Many, Tokens
from kvbench.tasks.order import balanced_order
from kvbench.tasks.ruler.generators import (
    CommonWords,
    Draft,
    FrequentWords,
    Generator,
    Niah,
    Questions,
    VariableTracking,
)
from kvbench.tasks.ruler.words import (
    Collection,
    Essays,
    files_of,
    hotpotqa,
    squad,
    words_version,
)

NIAH = {
    # haystack, keys, values, keys inserted, values per key, keys asked
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
QA = {"qa_1": "squad", "qa_2": "hotpotqa"}
GENERATED = (*NIAH, "vt", "cwe", "fwe")
TASKS = (*GENERATED, *QA)
DRAWS = 50
"""Of a sample, where the least prompt of a draw does not fit."""


def clean(prediction: str) -> str:
    """A prediction as RULER scores it: stripped, each character below U+0020 a line end, stripped."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of references that stand in a cleaned prediction, whatever their case."""
    text = prediction.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any reference stands in a cleaned prediction, whatever its case."""
    return float(match_all(prediction, references) > 0)


@dataclass(frozen=True, kw_only=True)
class Ruler(Task):
    """RULER's tasks at every length.

    Attributes:
        tasks: which of `TASKS`; by default the eleven that need no file.
        lengths: tokens of prompt and answer together, with all that the model sees: chat template and
            begin token, which RULER's own tools do not count in.
        num_examples: per task and length (500 as published).
        seed: of keys, values, words and places.
        essays: text files, or JSON objects with a field ``text``; a file or a glob. None: generated
            sentences stand for the essays.
        squad, hotpotqa: files of qa_1 and qa_2.
    """

    name: ClassVar[str] = "ruler"
    breakdown: ClassVar[tuple[str, ...]] = ("length",)
    heatmap: ClassVar[tuple[str, str] | None] = ("length", "task")
    unhashed: ClassVar[tuple[str, ...]] = ("essays", "squad", "hotpotqa")

    tasks: Distinct[str] = GENERATED
    lengths: Distinct[Tokens] = (4096,)
    num_examples: Many = 20
    seed: int = 42
    essays: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for task in self.tasks:
            if task not in TASKS:
                raise TaskError(
                    f"task.tasks has {task!r}{nearest(task, TASKS)}; allowed: {', '.join(TASKS)}"
                )
            if task in QA and getattr(self, QA[task]) is None:
                raise TaskError(
                    f"ruler: {task} needs task.{QA[task]}=<file>, "
                    + ("dev-v2.0.json of rajpurkar.github.io/SQuAD-explorer" * (task == "qa_1"))
                    + ("hotpot_dev_distractor_v1.json of hotpotqa.github.io" * (task == "qa_2"))
                )

    def digests(self) -> Mapping[str, str]:
        """sha256 of each file in use, and the version of the word lists."""
        found = {"words": words_version()}
        used = (
            {"essays"} if any(NIAH.get(task, ("",))[0] == "essay" for task in self.tasks) else set()
        )
        used |= {QA[task] for task in self.tasks if task in QA}
        for option in sorted(used):
            given = getattr(self, option)
            found |= digests_of(map(str, files_of(option, given))) if given else {}
        return found

    @cached_property
    def _essays(self) -> Essays:
        return Essays(self.essays, self.seed)

    @cached_property
    def _collections(self) -> dict[str, Collection]:
        """Documents of the qa tasks that are asked for."""
        read: dict[str, Callable[[Path], Collection]] = {"squad": squad, "hotpotqa": hotpotqa}
        return {
            task: read[QA[task]](files_of(QA[task], getattr(self, QA[task]))[0])
            for task in self.tasks
            if task in QA
        }

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every task at every length; of every prefix, the shares of each task and of each length are
        those of the whole to within one example.

        Raises:
            TaskError: a length that is too short for a task, a file that is missing or wrong.
        """
        ids: dict[int, int] = {}  # one object per token id: a set may have a hundred million tokens
        made = {
            (i, j): self._group(encoder, task, length, ids)
            for i, task in enumerate(self.tasks)
            for j, length in enumerate(self.lengths)
        }
        sizes = (len(self.tasks), len(self.lengths), self.num_examples)
        return [made[i, j][k] for i, j, k in balanced_order(sizes)]

    def _group(
        self, encoder: PromptEncoder, task: str, length: int, ids: dict[int, int]
    ) -> list[Example]:
        """The examples of one task and length; where one's size was found, the next one's begins."""
        generator = self._generator(encoder, task, length)
        found: list[Example] = []
        units = max(generator.least, length // 20)
        for number in range(self.num_examples):
            units, draft, (context, question) = self._sized(
                encoder, generator, task, length, number, units
            )
            found.append(
                Example(
                    id=f"{task}-{length}-{number:04d}",
                    context=draft.context,
                    question=draft.question + draft.prefix,
                    answers=draft.answers,
                    max_new_tokens=generator.new_tokens,
                    dataset=task,
                    context_ids=tuple(ids.setdefault(token, token) for token in context),
                    question_ids=tuple(ids.setdefault(token, token) for token in question),
                    complete=True,
                    settled=partial(_settled, task, draft.answers),
                    evidence=_needle_in(draft) if task.startswith("niah") else "",
                    fields={"task": task, "length": length, "units": units, **draft.fields},
                )
            )
        return found

    def _sized(
        self,
        encoder: PromptEncoder,
        generator: Generator,
        task: str,
        length: int,
        number: int,
        guess: int,
    ) -> tuple[int, Draft, SplitIds]:
        """Units, draft and tokens of the largest prompt of a sample that fits."""
        room = length - generator.new_tokens
        fitting: dict[int, tuple[Draft, SplitIds]] = {}
        seed, used = "", 0

        def tokens(size: int) -> int:
            nonlocal used
            draft = generator.draft(size, number, random.Random(seed))
            ids = encode_split(encoder, draft.context, draft.question, draft.prefix)
            used = sum(map(len, ids))
            if used <= room:
                fitting[size] = (draft, ids)
            return used

        bounds = {"least": generator.least, "most": generator.most}
        for draw in range(DRAWS):
            seed = f"kvbench ruler {self.seed} {task} {length} {number} {draw}"
            size = largest_fitting(tokens, room, **bounds, guess=guess)
            if size is not None:
                return size, *fitting[size]
            if used > 1.2 * room:  # no draw is so much shorter
                break
        raise TaskError(
            f"ruler: length {length} is too short for {task}: its shortest prompt and "
            f"{generator.new_tokens} new tokens take {used + generator.new_tokens} of this tokenizer; "
            "allowed: longer"
        )

    def _generator(self, encoder: PromptEncoder, task: str, length: int) -> Generator:
        if task in NIAH:
            return Niah(*NIAH[task], essays=self._essays)
        if task == "vt":
            return VariableTracking(self._example_lines(encoder, length))
        if task == "cwe":
            return CommonWords(long=length >= 4096)
        if task == "fwe":
            words = (length - FrequentWords(0).new_tokens) // 50
            if words < 5:
                raise TaskError(
                    f"ruler: length {length} is too short for fwe, which has a coded word per 50 "
                    "tokens and asks for three; allowed: 300 or longer"
                )
            return FrequentWords(words)
        return Questions(self._collections[task])

    def _example_lines(self, encoder: PromptEncoder, length: int) -> int:
        """Noise lines of vt's solved example: as many as fit 500 tokens, or half of a length below
        1,000; five, which its statements stand between, where that is too little."""

        def tokens(lines: int) -> int:
            seed = f"kvbench ruler {self.seed} vt {length}"
            return len(encoder.encode_text(VariableTracking.solved(lines, random.Random(seed))))

        least = VariableTracking(0).least
        room = min(VariableTracking.EXAMPLE_TOKENS, length // 2)
        found = largest_fitting(tokens, room, least=least, most=room, guess=least)
        return least if found is None else found

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """RULER's score, 0 to 1; ``null`` is 1 for a prediction that is empty once cleaned."""
        text = clean(prediction)
        match = match_part if example.dataset in QA else match_all
        return {"score": match(text, example.answers), "null": float(not text)}


def _needle_in(draft: Draft) -> str:
    """The sentence of the first needle that is asked for."""
    place = draft.context.find(draft.answers[0])
    begin = max(draft.context.rfind(mark, 0, place) + len(mark) for mark in ("\n", ". "))
    end = draft.context.find(".", place)
    return draft.context[begin : len(draft.context) if end < 0 else end + 1] if place >= 0 else ""


def _settled(task: str, references: Sequence[str], text: str) -> bool:
    """Whether a prediction that begins like this has the full score, whatever follows."""
    return (match_part if task in QA else match_all)(clean(text), references) == 1.0
