"""A tiny random vision-language model in a folder, and drawn images with captions in COCO's form, with
which captions.py runs without a network (tiny=true). What such a model says of an image is noise."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from PIL import Image, ImageDraw

import kvbench

RECALL = Path(kvbench.__file__).parent / "assets" / "recall_mini"
COLOURS = {"red": (220, 30, 30), "green": (20, 160, 60), "blue": (30, 60, 220)}


def save_model(folder: Path) -> None:
    """Save a random model of LLaVA's architecture: a CLIP tower of 64 patches before a Llama."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(RECALL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=4,
        projection_dim=16,
    )
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=processor.image_token_id,
            vision_feature_layer=-1,
        )
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def draw_images(folder: Path) -> Path:
    """Save an image of a disc for each colour, and their captions in a file, which is returned."""
    rows = []
    for number, (name, colour) in enumerate(COLOURS.items()):
        image = Image.new("RGB", (48 + 4 * number, 40), "white")
        ImageDraw.Draw(image).ellipse((8, 4, 30 + 4 * number, 30), fill=colour)
        image.save(folder / f"{name}.png")
        captions = [f"A {name} disc on a white wall.", f"One round {name} shape, drawn."]
        rows.append(
            {
                "filename": f"{name}.png",
                "split": "test",
                "sentences": [{"raw": caption} for caption in captions],
            }
        )
    file = folder / "dataset_coco.json"
    file.write_text(json.dumps({"images": rows}))
    return file


def save_both(folder: Path) -> str:
    """Save the model and the images in one folder; returns the file of the captions."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder)
    return str(draw_images(folder))
