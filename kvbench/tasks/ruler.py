"""RULER: thirteen tasks of any length.

C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv
2404.06654; github.com/NVIDIA/RULER at c3f5e3b4 (Apache-2.0, copyright NVIDIA CORPORATION). Strings,
settings and scores are its own. The questions are the same; the making of prompts departs from its
scripts:

* The largest prompt that fits is found by a search that always ends, removes single units (RULER
  removes steps, and a sample that is one token too long loses up to 500 words) and counts every token
  that the model sees.
* Every sample is drawn from its own seed (seed, task, length, number). RULER repeats, in all samples of
  a job, the order of the needles and the places of the answers of cwe and fwe.
* Wherever that is possible, a prompt of n units has the same draws as the beginning of one of n + 1
  units.
* A key is drawn again where it would be ambiguous: two needles of one key, or a distractor with the key
  that is asked for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from kvbench.errors import check_known
from kvbench.errors.options import Distinct
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Many, Task, TaskError, Tokens, balanced_order
from kvbench.tasks.data import file_digests
from kvbench.tasks.encoding import compact, encode_shared, largest_fitting
from kvbench.tasks.metrics_text import Key, contains_all
from kvbench.tasks.ruler_data import Collection, Essays, read_collection
from kvbench.tasks.ruler_generators import (
    PROMPTS,
    CommonWords,
    DocumentQuestions,
    Draft,
    FrequentWords,
    Generator,
    NeedleSettings,
    Niah,
    VariableTracking,
)
from kvbench.tasks.words import words_version

NIAH = {
    "niah_single_1": NeedleSettings("noise", "words", "numbers"),
    "niah_single_2": NeedleSettings("essay", "words", "numbers"),
    "niah_single_3": NeedleSettings("essay", "words", "uuids"),
    "niah_multikey_1": NeedleSettings("essay", "words", "numbers", num_keys=4),
    "niah_multikey_2": NeedleSettings("needle", "words", "numbers"),
    "niah_multikey_3": NeedleSettings("needle", "uuids", "uuids"),
    "niah_multivalue": NeedleSettings("essay", "words", "numbers", values_per_key=4),
    "niah_multiquery": NeedleSettings("essay", "words", "numbers", num_keys=4, keys_asked=4),
}
"""The needle tasks."""
QA = {"qa_1": "squad", "qa_2": "hotpotqa"}
"""The tasks about documents, with the option of `Ruler` that names the file of each."""
QA_FILES = {
    "qa_1": "dev-v2.0.json of rajpurkar.github.io/SQuAD-explorer",
    "qa_2": "hotpot_dev_distractor_v1.json of hotpotqa.github.io",
}
"""Where the file of each task about documents comes from."""
GENERATED = (*NIAH, "vt", "cwe", "fwe")
"""The tasks that need no file."""
TASKS = (*GENERATED, *QA)
DRAWS = 50
"""How many times a sample is drawn, where the shortest prompt of a draw does not fit."""


def clean(prediction: str) -> str:
    """A prediction as RULER scores it: every character below U+0020 becomes a line end, and white
    space at both ends is stripped before and after."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def matched(task: str, prediction: str, references: Sequence[str]) -> float:
    """The share of the references that a cleaned prediction contains, whatever their case; for the
    tasks about documents 1 if it contains any of them."""
    share = contains_all(prediction, Key(tuple(references)))["score"]
    return float(share > 0) if task in QA else share


def _is_final(task: str, references: Sequence[str], text: str) -> bool:
    """Whether a prediction that begins with this text has the full score, whatever follows."""
    return matched(task, clean(text), references) == 1.0


@dataclass(frozen=True, kw_only=True)
class Ruler(Task):
    """RULER's tasks at every length; conf/task/ruler.yaml tells the options. A length is of prompt and
    answer together, with all that the model sees: chat template and begin token included, which RULER's
    own tools do not count."""

    name: ClassVar[str] = "ruler"
    version: ClassVar[int] = 2
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
            check_known(f"task.tasks has {task!r}", task, TASKS, TaskError)
            if task in QA and getattr(self, QA[task]) is None:
                raise TaskError(f"ruler: {task} needs task.{QA[task]}=<file>, {QA_FILES[task]}")

    def digests(self) -> Mapping[str, str]:
        """The digests of the files in use (`file_digests`), and the version of the word lists."""
        options = {QA[task] for task in self.tasks if task in QA}
        if any(task in NIAH and NIAH[task].haystack == "essay" for task in self.tasks):
            options.add("essays")
        files = [getattr(self, option) for option in sorted(options)]
        return {"words": words_version(), **file_digests(filter(None, files))}

    @cached_property
    def _essays(self) -> Essays:
        return Essays(self.essays, self.seed)

    @cached_property
    def _collections(self) -> dict[str, Collection]:
        options = {task: QA[task] for task in self.tasks if task in QA}
        return {task: read_collection(name, getattr(self, name)) for task, name in options.items()}

    def metric_name(self) -> str:
        return "references found"

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every task at every length. In every prefix the tasks and the lengths occur equally often,
        to within one example.
        """
        groups = [
            [self._group(encoder, task, length) for length in self.lengths] for task in self.tasks
        ]
        order = balanced_order((len(self.tasks), len(self.lengths), self.num_examples))
        return [groups[task][length][number] for task, length, number in order]

    def _group(self, encoder: PromptEncoder, task: str, length: int) -> list[Example]:
        """The search for the size of each begins at the size of the example before it."""
        generator = self._generator(encoder, task, length)
        examples: list[Example] = []
        units = max(generator.least, length // 20)
        for number in range(self.num_examples):
            units, draft, context, question = self._largest(
                encoder, generator, task, length, number, units
            )
            examples.append(
                Example(
                    id=f"{task}-{length}-{number:04d}",
                    context=draft.context,
                    question=draft.question + draft.prefix,
                    answers=draft.answers,
                    max_new_tokens=PROMPTS[generator.name].new_tokens,
                    dataset=task,
                    context_ids=compact(context),
                    question_ids=compact(question),
                    is_final=self.if_scored_by(Ruler, partial(_is_final, task, draft.answers)),
                    evidence=draft.evidence,
                    fields={"task": task, "length": length, "units": units, **draft.fields},
                )
            )
        return examples

    def _largest(
        self,
        encoder: PromptEncoder,
        generator: Generator,
        task: str,
        length: int,
        number: int,
        guess: int,
    ) -> tuple[int, Draft, Sequence[int], Sequence[int]]:
        """Units, text and token ids of the largest prompt of sample `number` that fits."""
        new_tokens = PROMPTS[generator.name].new_tokens
        room = length - new_tokens
        drafts: dict[int, tuple[Draft, Sequence[int], Sequence[int]]] = {}
        used = 0

        def tokens(units: int, seed: str) -> int:
            nonlocal used
            draft = generator.draft(units, number, random.Random(seed))
            question = (draft.question, draft.prefix)
            context_ids, (question_ids,) = encode_shared(encoder, draft.context, [question])
            drafts[units] = (draft, context_ids, question_ids)
            used = len(context_ids) + len(question_ids)
            return used

        for draw in range(DRAWS):
            drafts.clear()
            measured = partial(
                tokens, seed=f"kvbench ruler {self.seed} {task} {length} {number} {draw}"
            )
            units = largest_fitting(
                measured, room, least=generator.least, most=generator.most, guess=guess
            )
            if units is not None:
                return units, *drafts[units]
            if used > 1.2 * room:
                # Draws differ by less than that, so no other draw fits.
                break
        raise TaskError(
            f"ruler: length {length} is too short for {task}: its shortest prompt and {new_tokens} new "
            f"tokens take {used + new_tokens} of this tokenizer; allowed: longer"
        )

    def _generator(self, encoder: PromptEncoder, task: str, length: int) -> Generator:
        if task in NIAH:
            return Niah(NIAH[task], self._essays)
        if task == "vt":
            return VariableTracking(self._example_lines(encoder, length))
        if task == "cwe":
            return CommonWords(long=length >= 4096)
        if task == "fwe":
            vocabulary = (length - PROMPTS["fwe"].new_tokens) // 50
            if vocabulary < 5:
                raise TaskError(
                    f"ruler: length {length} is too short for fwe, which has a coded word per 50 "
                    "tokens and asks for three; allowed: 300 or longer"
                )
            return FrequentWords(vocabulary)
        return DocumentQuestions(self._collections[task])

    def _example_lines(self, encoder: PromptEncoder, length: int) -> int:
        """The lines of noise in the solved example of vt: as many as fit in 500 tokens, or in half of
        a length below 1,000; at least the five that its statements need."""

        def tokens(lines: int) -> int:
            seed = f"kvbench ruler {self.seed} vt {length}"
            return len(encoder.encode_text(VariableTracking.solved(lines, random.Random(seed))))

        least = VariableTracking.least
        room = min(VariableTracking.EXAMPLE_TOKENS, length // 2)
        lines = largest_fitting(tokens, room, least=least, most=room, guess=least)
        return least if lines is None else lines

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """RULER's score, 0 to 1. ``null`` is 1 for a prediction that is empty once cleaned."""
        text = clean(prediction)
        return {
            "score": matched(example.dataset, text, example.answers),
            "null": float(not text),
        }
