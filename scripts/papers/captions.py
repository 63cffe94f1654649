"""Captions of COCO's images by a vision-language model, whose image tokens are compressed like any
others.

BalanceKV (arXiv 2502.07861), Table 4: InternVL2.5-8B at rates 1/4 and 1/16. Differences from the paper:
which images, prompt, tiles an image, sink and window it took is not known; here Karpathy's test split,
the processor's own tiles and 32 tokens at both ends. METEOR, which needs Java, is left out. The table's
BLEU is that of all captions together, CIDEr-D and ROUGE-L are means over captions.

    COCO=<folder of dataset_coco.json and the images> kvbench reproduce balancekv_table4      a GPU
    kvbench reproduce balancekv_table4 model=recall_mini limit=1      20 s on one core
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
from _captions import CiderD, bleu, rouge_l
from _common import Run, started
from _tiny_vision import save_both
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from kvbench import compress
from kvbench.errors import UserError

QUESTION = "Provide a one-sentence caption for the image."


def captions_of(data: str | None, split: str) -> dict[str, list[str]]:
    """References by image file, of Karpathy and Fei-Fei's dataset_coco.json."""
    try:
        images = json.loads(Path(data or "").read_bytes())["images"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"data is {data!r}; allowed: the file dataset_coco.json") from error
    references = {}
    for image in images:
        if image["split"] == split:
            file = str(Path(image.get("filepath", "")) / image["filename"])
            references[file] = [sentence["raw"] for sentence in image["sentences"]]
    return references


def inputs_of(processor: Any, image: Path, question: str) -> Any:
    """The processor's tensors of one image and a question, in the chat template where it has one."""
    if processor.chat_template:  # which has the special tokens in it
        content = [{"type": "image"}, {"type": "text", "text": question}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    else:
        text = f"{getattr(processor, 'image_token', '<image>')}\n{question}"
    inputs = processor(
        images=Image.open(image).convert("RGB"),
        text=text,
        return_tensors="pt",
        add_special_tokens=not processor.chat_template,
    )
    inputs.pop("mm_token_type_ids", None)
    return inputs


def load_vision_model(run: Run) -> tuple[Any, Any]:
    spec = run.session.spec
    processor = AutoProcessor.from_pretrained(spec.path, revision=spec.revision)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        spec.path, revision=spec.revision, dtype=run.session.dtype
    )
    return processor, model.to(run.session.device).eval()


def main(arguments: Sequence[str]) -> None:
    """Write a row for each image, method and rate: the caption and its scores. BLEU is printed.

    Keys of its own: data (the JSON file), images (their folder; null: the file's), split, question,
    methods, rates, new_tokens, tiny (true: a tiny random model and drawn images).
    """
    run = Run(
        __file__,
        arguments,
        "model=OpenGVLab/InternVL2_5-8B-hf",
        "",
        limit=5000,
        data=None,
        images=None,
        split="test",
        question=QUESTION,
        methods=["uniform", "balancekv"],
        rates=[0.25, 0.0625],
        new_tokens=30,
        tiny=False,
    )
    if run.tiny:
        run.data = save_both(Path(run.results_dir, run.name, "tiny"))
        run.overrides = [f"model={Path(run.data).parent}"]
    references = dict(list(captions_of(run.data, run.split).items())[: run.limit])
    folder = Path(run.images or Path(run.data).parent)
    processor, model = load_vision_model(run)
    cider = CiderD(references.values())
    variants = [("exact", 1.0)]
    variants += [(method, rate) for rate in run.rates for method in run.methods]
    rows = []
    for file, texts in references.items():
        inputs = inputs_of(processor, folder / file, run.question).to(model.device, model.dtype)
        prompt_tokens = inputs["input_ids"].shape[1]
        for method, rate in variants:
            compressed = compress(model, method, rate=rate, seed=run.seed)
            with compressed if rate < 1 else nullcontext():
                ids = model.generate(**inputs, max_new_tokens=run.new_tokens, do_sample=False)
            answer = processor.decode(ids[0, prompt_tokens:], skip_special_tokens=True)
            caption = answer.split("\n")[0]
            rows.append(
                {
                    "image": file,
                    "method": method,
                    "rate": rate,
                    "caption": caption,
                    "of": "images",
                    "cider": cider.score(caption, texts),
                    "rouge_l": rouge_l(caption, texts),
                }
            )
    run.save(rows, y="cider", x="rate", by="method", panel="of")
    for names, part in pd.DataFrame(rows).groupby(["method", "rate"], sort=False):
        scores = bleu(list(part["caption"]), [references[file] for file in part["image"]])
        print(*names, "BLEU-1 to -4:", *(f"{100 * score:.1f}" for score in scores))


if __name__ == "__main__":
    started(main)
