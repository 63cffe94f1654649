"""A model folder with a hostile pickle, secrets, and a search for them in what was written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import kvbench

PACKAGE = Path(kvbench.__file__).parent
SMALL = ["task=longeval_lines", "task.num_lines=[5]", "task.num_examples=1"]
SMALL += ["method=[exact,snapkv]"]
RUN = [*SMALL, "model=tiny_random", "device=cpu", "task.max_new_tokens=1"]
SECRETS = {
    "HF_TOKEN": "hf_" + "Q7x" * 11,
    "WANDB_API_KEY": "0123456789abcdef" * 2 + "deadbeef",
    "OPENAI_API_KEY": "plantedopenaikey99",
    "MY_PASSWORD": "correct-horse-battery",
}
TYPED = "hf_" + "T9y" * 11


def model_folder(folder: Path, mark: Path) -> Path:
    """A model whose weights are a pickle that makes the file `mark` when it is loaded."""

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return (open, (str(mark), "w"))

    asset = PACKAGE / "assets" / "recall_mini"
    shutil.copytree(asset, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"model.embed_tokens.weight": Evil()}, folder / "pytorch_model.bin")
    return folder


def written(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leaks(folder: Path, text: str) -> list[str]:
    """Where a secret stands in the files below the folder or in the text."""
    values = [*SECRETS.values(), TYPED]
    found = [f"said: {value}" for value in values if value in text]
    for path, content in written(folder).items():
        found += [f"{path}: {value}" for value in values if value.encode() in content]
    return found
