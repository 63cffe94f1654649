"""Model folders made to do harm, or broken: nothing is unpickled or run, and each is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.attacks import PACKAGE, model_folder

from kvbench.engine.model import ModelError, ModelSpec, load_model, load_tokenizer, prompt_encoder
from kvbench.prompts import PromptEncoder, PromptError

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def loaded(folder: Path) -> PromptEncoder:
    spec = ModelSpec(name="m", path=str(folder))
    encoder = prompt_encoder(load_tokenizer(spec), spec)
    encoder.encode_text("a" * 40 + " aab " * 10)
    load_model(spec, device=torch.device("cpu"), dtype=torch.float32)
    return encoder


def changed(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def index_of(weight_map: Any) -> str:
    return json.dumps({"metadata": {}, "weight_map": weight_map})


Harm = Callable[[Path], object]


def hidden(name: str, index: str | None = None, **config: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").rename(folder / name)
        if index is not None:
            (folder / index).write_text(index_of({"model.embed_tokens.weight": name}))
        changed(folder / "config.json", **config)

    return harm


def entry(**fields: Any) -> Callable[[bytes], bytes]:
    """Change the first tensor's entry in a safetensors header, by default its shape."""

    def apply(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + size])
        first = next(e for name, e in entries.items() if name != "__metadata__")
        first.update(fields or {"shape": first["shape"][::-1]})
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return apply


def weights(change: Callable[[bytes], bytes]) -> Harm:
    def harm(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))

    return harm


def lacking(folder: Path) -> None:
    found = load_file(folder / WEIGHTS)
    del found[next(key for key in sorted(found) if "mlp" in key)]
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})


def file(name: str, content: Any) -> Harm:
    def harm(folder: Path) -> None:
        text = json.dumps(content).replace("MARK", str(folder.parent / "owned"))
        if isinstance(content, dict):
            changed(folder / name, **json.loads(text))
        else:
            (folder / name).write_text(text)

    return harm


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class EvilConfig(LlamaConfig):
    model_type = "evil"
class Evil(LlamaForCausalLM):
    config_class = EvilConfig
"""


def code(folder: Path) -> None:
    (folder / "evil.py").write_text(CODE.format(mark=str(folder.parent / "owned")))
    classes = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    changed(folder / "config.json", auto_map=classes, model_type="evil")
    changed(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]})


def template(text: str) -> Harm:
    return file("tokenizer_config.json", {"chat_template": text})


CANNOT = "cannot be loaded: "
FOLDERS: dict[str, tuple[Harm, str]] = {
    "a pickle": (hidden("pytorch_model.bin"), "safetensors"),
    "a pickle behind an index": (
        hidden("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"),
        "safetensors",
    ),
    "a pickle behind safetensors' index": (hidden("pytorch_model.bin", INDEX), "safetensors"),
    "a pickle named by the config": (
        hidden("adapter_model.bin", transformers_weights="adapter_model.bin"),
        "safetensors",
    ),
    "a pickle called safetensors": (hidden(WEIGHTS), CANNOT),
    "code of its own": (code, "trust_remote_code"),
    "a header of exabytes": (weights(lambda _: (2**60).to_bytes(8, "little") + b"{}"), CANNOT),
    "an offset beyond the file": (weights(entry(data_offsets=[0, 2**50])), CANNOT),
    "another shape": (
        weights(entry()),
        "holds model.embed_tokens.weight of shape (128, 1984); allowed: (1984, 128)",
    ),
    "weights that are missing": (lacking, "lacks 1 weights, e.g. model.layers.0.mlp"),
    "a template that reaches for the system": (
        template("{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}"),
        "",
    ),
    "a template that says it twice": (
        template("{% for m in messages %}{{ m['content'] }} {{ m['content'] }}{% endfor %}"),
        "prints a message 2 times; allowed: once, as it is",
    ),
    "an end token that is a number": (file("tokenizer_config.json", {"eos_token": 5}), ""),
    "a vocabulary that is none": (file("tokenizer.json", []), ""),
    "an end that is text": (file("generation_config.json", {"eos_token_id": "abc"}), ""),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_harmful_or_broken_folder_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    harm, says = FOLDERS[kind]
    mark = tmp_path / "owned"
    folder = model_folder(tmp_path / "model", mark)
    shutil.copy(PACKAGE / "assets" / "recall_mini" / WEIGHTS, folder)
    harm(folder)

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", opened)
    with pytest.raises((ModelError, PromptError), match=r"^[^\n]*$") as error:
        loaded(folder)
    assert str(folder) in str(error.value)
    assert says in str(error.value)
    assert "was opened" not in str(error.value)
    assert not mark.exists()


def test_unusual_folders_that_are_sound_load(tmp_path: Path) -> None:
    folder = shutil.copytree(PACKAGE / "assets" / "recall_mini", tmp_path / "model")
    found = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    parts = {f"model-{n}-of-2.safetensors": sorted(found)[n - 1 :: 2] for n in (1, 2)}
    for name, keys in parts.items():
        save_file({k: found[k] for k in keys}, folder / name, metadata={"format": "pt"})
    (folder / INDEX).write_text(index_of({k: name for name, keys in parts.items() for k in keys}))
    template("<u>{% for m in messages %}{{ m['content'] | trim }}{% endfor %}</u>")(folder)
    encoder = loaded(folder)
    around = [encoder.tokenizer.decode(list(i)) for i in (encoder.prefix_ids, encoder.suffix_ids)]
    assert around == ["<u>", "</u>"]


def test_a_text_of_twenty_megabytes_is_not_tokenised() -> None:
    class Never:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("tokenised")

        decode = encode

    with pytest.raises(PromptError, match=r"a prompt of 20400000 characters, 'words .* most"):
        PromptEncoder(Never()).encode_text("words " * 3_400_000)
