"""Captions of images, as MS COCO asks for them: for vision-language models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvbench.tasks.base import Example, PromptEncoder, Task, TaskError
from kvbench.tasks.caption_metrics import CiderD, bleu, rouge_l
from kvbench.tasks.files import digests_of
from kvbench.tasks.options import Many, NewTokens


@dataclass(frozen=True, kw_only=True)
class Captions(Task):
    """One image a prompt, and the question behind it; the image's tokens are compressed with the rest.

    The score is CIDEr-D, its document frequencies those of all references of the file. ROUGE-L and BLEU
    stand beside it; a table's BLEU is the mean over captions, `kvbench.tasks.caption_metrics.bleu` adds
    up counts over a set, as COCO does.

    Attributes:
        data: a JSON file: COCO's annotations (images, annotations), the splits of Karpathy and Fei-Fei
            (images with sentences), or a list of {image, captions}.
        images: the folder of the image files; null: the file's own.
        split: of Karpathy's file.
        question: what is asked of every image.
    """

    name: ClassVar[str] = "captions"
    score_unit: ClassVar[str] = "points"
    measures: ClassVar[tuple[str, ...]] = ("cider", "rouge_l", "bleu_1", "bleu_4")
    unhashed: ClassVar[tuple[str, ...]] = ("num_examples", "images")

    data: str | None = None
    images: str | None = None
    split: str = "test"
    question: str = "Provide a one-sentence caption for the image."
    num_examples: Many = 5000
    max_new_tokens: NewTokens = 30
    stop: Sequence[str] = field(default=("\n",))

    @cached_property
    def _rows(self) -> list[tuple[str, list[str]]]:
        """File name and references of each image."""
        if self.data is None:
            raise TaskError(
                "task.data is null; allowed: a JSON file of COCO's captions (cocodataset.org), with "
                "task.images=<folder of the image files>"
            )
        try:
            found = json.loads(Path(self.data).read_bytes())
            rows = _rows(found, self.split)
        except OSError as problem:
            raise TaskError(f"captions: cannot read {self.data}: {problem.strerror}") from problem
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise TaskError(
                f"captions: {self.data} has none of COCO's forms ({type(problem).__name__}: {problem}); "
                "allowed: images and annotations, images with sentences, a list of {image, captions}"
            ) from problem
        for file, captions in rows:
            if not captions:
                raise TaskError(
                    f"captions: {file} of {self.data} has no caption; allowed: one or more"
                )
        return rows[: self.num_examples]

    @cached_property
    def _cider(self) -> CiderD:
        return CiderD.of(captions for _, captions in self._rows)

    def digests(self) -> Mapping[str, str]:
        """See `Task.digests`: of the file of captions."""
        return digests_of([] if self.data is None else [self.data])

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """See `Task.examples`; the context ends with the image, the question follows.

        Raises:
            TaskError: no data, an image that is not there, or a model that sees none.
        """
        if encoder.images is None:
            raise TaskError(
                "task captions shows images and the model reads text alone; allowed: a vision-language "
                "model (model=<id of the Hub or folder>)"
            )
        found = []
        for file, captions in self._rows:
            place = self._folder / file
            if not place.is_file():
                raise TaskError(
                    f"captions: no image {place}; allowed: task.images=<folder of the image files>"
                )
            shown = encoder.images(self.question, [str(place)])
            found.append(
                Example(
                    id=file,
                    context="",
                    question=self.question,
                    answers=tuple(captions),
                    max_new_tokens=self.max_new_tokens,
                    dataset=self.name,
                    stop=tuple(self.stop),
                    context_ids=shown.ids[: shown.cut],
                    question_ids=shown.ids[shown.cut :],
                    complete=True,
                    images=(str(place),),
                )
            )
        return found

    @property
    def _folder(self) -> Path:
        return Path(self.images) if self.images is not None else Path(self.data or "").parent

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """CIDEr-D, and the others."""
        cider = self._cider.score(prediction, example.answers)
        each = bleu([prediction], [example.answers])
        return {
            "score": cider,
            "cider": cider,
            "rouge_l": rouge_l(prediction, example.answers),
            **{f"bleu_{n}": value for n, value in enumerate(each, start=1)},
        }


def _rows(found: Any, split: str) -> list[tuple[str, list[str]]]:
    if isinstance(found, list):
        return [(str(row["image"]), [str(one) for one in row["captions"]]) for row in found]
    if "annotations" in found:
        captions: dict[Any, list[str]] = {}
        for one in found["annotations"]:
            captions.setdefault(one["image_id"], []).append(str(one["caption"]))
        return [(str(row["file_name"]), captions.get(row["id"], [])) for row in found["images"]]
    return [
        (str(Path(row.get("filepath", "")) / row["filename"]), [s["raw"] for s in row["sentences"]])
        for row in found["images"]
        if row["split"] == split
    ]
