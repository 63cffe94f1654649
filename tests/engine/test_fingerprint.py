"""A model's fingerprint: the same for the same model wherever it lies, another for another model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import tiny_model

from kvbench.catalogue import config_dir
from kvbench.engine.fingerprint import fingerprint
from kvbench.engine.model import ModelError, ModelSpec

ASSET = config_dir().parent / "assets" / "recall_mini"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "first"
    tiny_model("llama").save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSET / name, place)
    return place


def of(folder: Path, **options: Any) -> str | None:
    return fingerprint(ModelSpec(name="m", path=str(folder), **options))


def change(file: str, **values: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        known = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(known | values))

    return write


def weights(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return write


NORM, HEAD = "model.norm.weight", "model.embed_tokens.weight"
SAME = {
    "another time": lambda folder: os.utime(folder / "model.safetensors", (0, 0)),
    "the order of tensors": weights(lambda tensors: tensors.update({NORM: tensors.pop(NORM)})),
    "who wrote the config": change("config.json", transformers_version="9", _name_or_path="/x"),
    "a file of notes": lambda folder: (folder / "README.md").write_text("x"),
    "other shards": lambda folder: shards(folder),
}
OTHER = {
    "one number": weights(lambda tensors: tensors[NORM][0].add_(1)),
    "the last number": weights(lambda tensors: tensors[HEAD].view(-1)[-1].add_(1)),
    "a dtype": weights(lambda tensors: tensors.update({NORM: tensors[NORM].double()})),
    "a shape": weights(lambda tensors: tensors.update({NORM: tensors[NORM][None]})),
    "a name": weights(lambda tensors: tensors.update({"x": tensors.pop(NORM)})),
    "the config": change("config.json", rms_norm_eps=0.5),
    "the tokenizer": change("tokenizer.json", version="2"),
    "the chat template": lambda folder: (folder / "chat_template.jinja").write_text("x"),
    "the generation config": change("generation_config.json", repetition_penalty=1.1),
}


def shards(folder: Path) -> None:
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    files = {"a.safetensors": dict(tensors[::2]), "b.safetensors": dict(tensors[1::2])}
    for name, part in files.items():
        save_file(part, folder / name)
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("what", [*SAME, *OTHER])
def test_which_models_are_one(folder: Path, tmp_path: Path, what: str) -> None:
    other = shutil.copytree(folder, tmp_path / "second")
    assert of(other) == of(folder)
    (SAME | OTHER)[what](other)
    assert (of(other) == of(folder)) == (what in SAME)


def test_a_tokenizer_of_another_path_counts_and_random_weights_are_the_files_beside_them(
    folder: Path,
) -> None:
    assert of(folder, tokenizer=str(ASSET)) != of(folder)
    llama = {"random_weights": True, "architecture": {"model_type": "llama"}}
    random = of(folder, **llama)
    weights(lambda tensors: tensors[NORM].add_(1))(folder)
    assert of(folder, **llama) == random
    change("tokenizer.json", version="2")(folder)
    assert of(folder, **llama) != random


def test_an_adapter_is_refused_and_damaged_weights_are_one_line(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter, whose base may be any"):
        of(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"not JSON")
    with pytest.raises(ModelError, match="cannot be loaded"):
        of(folder)


def test_a_gguf_file_is_its_metadata_and_its_tensors(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the gguf package: kvbench[quantized]")
    from support.gguf_files import write_gguf

    model = tiny_model("llama")
    prints = []
    for number in range(3):
        file = tmp_path / str(number) / "tiny.gguf"
        file.parent.mkdir()
        write_gguf(model, file)
        prints.append(of(file.parent, quantization="gguf"))
        if number:
            with torch.no_grad():
                model.model.norm.weight[0] += 1
    assert prints[0] == prints[1] != prints[2]
