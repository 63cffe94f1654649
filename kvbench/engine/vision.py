"""Prompts with images: the model's processor makes the tokens of an image and the input of the vision
tower. Image tokens are part of the prompt like any others, and are compressed with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoProcessor,
    PreTrainedConfig,
)

from kvbench.engine.attention import IMPLEMENTATION, UnsupportedModel
from kvbench.tasks.base import ShownImages

READ = ("pixel_values", "image_sizes")
"""Inputs of a model beside the tokens that are supported."""


def reads_images(config: PreTrainedConfig) -> bool:
    """Whether a config is that of a vision-language model."""
    return (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )


VISION = ("internvl", "llava")
"""Model types that read a prompt, images included, as one row of causal tokens with one position each.
Not Qwen2-VL (positions on three axes) nor Gemma 3 (image tokens attend to each other both ways)."""


def check_vision(config: PreTrainedConfig) -> None:
    """Refuse vision-language models whose prompts may be more than a row of tokens.

    Raises:
        UnsupportedModel: naming the type.
    """
    if config.model_type not in VISION:
        raise UnsupportedModel(
            f"model type {config.model_type!r} reads images; allowed of these: {', '.join(VISION)}, "
            "whose image tokens are causal and have one position each"
        )


def text_attention(config: PreTrainedConfig) -> dict[str, str]:
    """kvbench's attention for the language model alone: the vision tower keeps its own."""
    text = config.get_text_config()
    (part,) = (key for key in config.sub_configs if getattr(config, key, None) is text)
    return {part: IMPLEMENTATION}


@dataclass(frozen=True)
class ImageEncoder:
    """A question about images, in the model's chat template where it has one.

    Attributes:
        processor: transformers' processor of the model.
        chat: whether its chat template is used.
    """

    processor: Any
    chat: bool

    def __call__(self, text: str, files: Sequence[str]) -> ShownImages:
        """Tokens of the images, in order, followed by those of the text.

        Raises:
            UnsupportedModel: the processor makes inputs that are not supported.
        """
        images = [Image.open(file).convert("RGB") for file in files]
        processor = self.processor
        if self.chat:
            content = [*({"type": "image"} for _ in files), {"type": "text", "text": text}]
            text = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        else:
            text = processor.image_token * len(files) + "\n" + text
        made: Mapping[str, Tensor] = processor(
            images=images,
            text=text,
            return_tensors="pt",
            add_special_tokens=not self.chat,
            return_mm_token_type_ids=False,
        )
        inputs = {k: v for k, v in made.items() if k not in ("input_ids", "attention_mask")}
        if not set(inputs) <= set(READ):
            raise UnsupportedModel(
                f"{type(processor).__name__} gives {', '.join(sorted(inputs))}; allowed: "
                f"{', '.join(READ)}"
            )
        ids = tuple(made["input_ids"][0].tolist())
        image_ids = {processor.image_token_id, *getattr(processor, "image_token_ids", ())}
        cut = max(place for place, token in enumerate(ids) if token in image_ids) + 1
        return ShownImages(ids, cut, inputs)


def load_processor(path: str, **where: Any) -> Any:
    """The processor of a model's folder; images are prepared by PIL, without torchvision."""
    return AutoProcessor.from_pretrained(path, **where)
