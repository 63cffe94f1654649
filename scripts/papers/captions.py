"""Captions of COCO's images by a vision-language model, whose image tokens are compressed like any
others.

BalanceKV (arXiv 2502.07861), Table 4: InternVL2.5-8B at rates 1/4 and 1/16. Differences from the paper:
which images, prompt, tiles an image, sink and window it took is not known; here Karpathy's test split,
the processor's own tiles and 32 tokens at both ends. METEOR, which needs Java, is left out. The table's
BLEU is that of all captions together, CIDEr-D and ROUGE-L are means over captions.
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
    """References by image file, of Karpathy and Fei-Fei's dataset_coco.json.

    Raises:
        UserError: no file that can be read.
    """
    try:
        rows = json.loads(Path(data or "").read_bytes())["images"]
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise UserError(f"data is {data!r}; allowed: the file dataset_coco.json") from problem
    return {
        str(Path(row.get("filepath", "")) / row["filename"]): [s["raw"] for s in row["sentences"]]
        for row in rows
        if row["split"] == split
    }


def inputs_of(processor: Any, image: Path, question: str) -> Any:
    """The processor's tensors of one image and a question, in the chat template where it has one."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = f"{getattr(processor, 'image_token', '<image>')}\n{question}"
    if processor.chat_template:
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    special = not processor.chat_template  # the template has its own
    picture = Image.open(image).convert("RGB")
    made = processor(images=picture, text=text, return_tensors="pt", add_special_tokens=special)
    made.pop("mm_token_type_ids", None)
    return made


def main(given: Sequence[str]) -> None:
    """A row for each image, method and rate: the caption and its scores. Own keys: data (the JSON file),
    images (their folder; null: the file's), split, question, methods, rates, new_tokens, tiny
    (a tiny random model and drawn images)."""
    own: dict[str, Any] = {"data": None, "images": None, "split": "test", "question": QUESTION}
    own |= {"methods": ["uniform", "balancekv"], "rates": [0.25, 0.0625], "new_tokens": 30}
    own["tiny"] = False
    run = Run(__file__, given, "model=OpenGVLab/InternVL2_5-8B-hf", "", **own, limit=5000)
    if run.tiny:
        run.data = save_both(Path(run.results_dir, run.name, "tiny"))
        run.overrides = [f"model={Path(run.data).parent}"]
    references = dict(list(captions_of(run.data, run.split).items())[: run.limit])
    folder = Path(run.images or Path(run.data).parent)
    spec, cider = run.session.spec, CiderD(references.values())
    processor = AutoProcessor.from_pretrained(spec.path, revision=spec.revision)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        spec.path, revision=spec.revision, dtype=run.session.dtype
    )
    model = model.to(run.session.device).eval()
    variants = [("exact", 1.0), *((m, rate) for rate in run.rates for m in run.methods)]
    rows = []
    for file, texts in references.items():
        inputs = inputs_of(processor, folder / file, run.question).to(model.device, model.dtype)
        for method, rate in variants:
            held = compress(model, method, rate=rate, seed=run.seed)
            with held if rate < 1 else nullcontext():
                ids = model.generate(**inputs, max_new_tokens=run.new_tokens, do_sample=False)
            new = ids[0, inputs["input_ids"].shape[1] :]
            said = processor.decode(new, skip_special_tokens=True).split("\n")[0]
            row = {"image": file, "method": method, "rate": rate, "caption": said, "of": "images"}
            rows.append(row | {"cider": cider.score(said, texts), "rouge_l": rouge_l(said, texts)})
    run.save(rows, y="cider", x="rate", by="method", panel="of")
    for names, part in pd.DataFrame(rows).groupby(["method", "rate"], sort=False):
        scores = bleu(list(part["caption"]), [references[file] for file in part["image"]])
        print(*names, "BLEU-1 to -4:", *(f"{100 * value:.1f}" for value in scores))


if __name__ == "__main__":
    started(main)
