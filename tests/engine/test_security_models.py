"""Model folders made to do harm, or broken: nothing is unpickled or run, and each is one line."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.attacks import PACKAGE, model_folder

from kvbench import compare
from kvbench.engine import loading
from kvbench.engine.loading import (
    ModelError,
    ModelSpec,
    load_config,
    load_model,
    load_tokenizer,
    prompt_encoder,
)
from kvbench.engine.stopping import Stopping
from kvbench.tasks.base import PromptEncoder, TaskError, tokenizing

INDEX = "model.safetensors.index.json"


def loaded(folder: Path) -> None:
    """Everything a job reads of a model's folder."""
    spec = ModelSpec(name="m", path=str(folder))
    prompt_encoder(load_tokenizer(spec), spec)
    load_model(spec, device=torch.device("cpu"), dtype=torch.float32)


def refused(folder: Path) -> str:
    """The one line in which a folder is refused."""
    with pytest.raises(ModelError) as error:
        loaded(folder)
    line = str(error.value)
    assert "\n" not in line
    assert str(folder) in line
    return line


def copied(folder: Path) -> Path:
    """The shipped model, for harm to be done to it."""
    shutil.copytree(PACKAGE / "assets" / "recall_mini", folder)
    return folder


def changed(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def index_of(weight_map: Any) -> str:
    return json.dumps({"metadata": {}, "weight_map": weight_map})


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", opened)


def as_bin_with_an_index(folder: Path, pickled: Path) -> None:
    pickled.rename(folder / "pytorch_model-00001-of-00001.bin")
    text = index_of({"model.embed_tokens.weight": "pytorch_model-00001-of-00001.bin"})
    (folder / "pytorch_model.bin.index.json").write_text(text)


def behind_a_safetensors_index(folder: Path, pickled: Path) -> None:
    (folder / INDEX).write_text(index_of({"model.embed_tokens.weight": pickled.name}))


def named_by_the_config(folder: Path, pickled: Path) -> None:
    pickled.rename(folder / "adapter_model.bin")
    changed(folder / "config.json", transformers_weights="adapter_model.bin")


def behind_an_index_named_by_the_config(folder: Path, pickled: Path) -> None:
    (folder / "mine.safetensors.index.json").write_text(index_of({"w": pickled.name}))
    changed(folder / "config.json", transformers_weights="mine.safetensors.index.json")


def called_safetensors(folder: Path, pickled: Path) -> None:
    pickled.rename(folder / "model.safetensors")


HIDDEN_PICKLES = [
    as_bin_with_an_index,
    behind_a_safetensors_index,
    named_by_the_config,
    behind_an_index_named_by_the_config,
    called_safetensors,
]


@pytest.mark.parametrize("hide", HIDDEN_PICKLES)
def test_a_pickle_is_not_opened_wherever_it_hides(
    tmp_path: Path, no_pickle: None, hide: Callable[[Path, Path], None]
) -> None:
    folder = model_folder(tmp_path / "model", tmp_path / "owned")
    hide(folder, folder / "pytorch_model.bin")
    line = refused(folder)
    assert "safetensor" in line.replace(str(folder), "").lower()
    assert "was opened" not in line
    assert not (tmp_path / "owned").exists()


def test_a_model_in_several_safetensors_files_is_read(tmp_path: Path) -> None:
    folder = copied(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"model-{n}-of-2.safetensors": sorted(weights)[n - 1 :: 2] for n in (1, 2)}
    for name, keys in parts.items():
        save_file({k: weights[k] for k in keys}, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, keys in parts.items() for key in keys}
    (folder / INDEX).write_text(index_of(weight_map))
    loaded(folder)


def test_a_model_that_lacks_weights_is_refused_and_not_filled_with_random_ones(
    tmp_path: Path,
) -> None:
    folder = copied(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    gone = next(key for key in sorted(weights) if "mlp" in key)
    del weights[gone]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"lacks 1 weights, e.g. {gone}; allowed" in refused(folder)


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + size])
        change(next(e for name, e in entries.items() if name != "__metadata__"))
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return apply


BROKEN_WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a header of exabytes": lambda content: (2**60).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": lambda content: (5).to_bytes(8, "little") + b"abcde",
    "an offset beyond the file": header(lambda entry: entry.update(data_offsets=[0, 2**50])),
    "an unknown type": header(lambda entry: entry.update(dtype="X99")),
    "another shape": header(lambda entry: entry.update(shape=entry["shape"][::-1])),
}


@pytest.mark.parametrize("kind", BROKEN_WEIGHTS)
def test_broken_weights_are_one_line(tmp_path: Path, kind: str) -> None:
    file = copied(tmp_path / "model") / "model.safetensors"
    file.write_bytes(BROKEN_WEIGHTS[kind](file.read_bytes()))
    line = refused(file.parent)
    if kind == "another shape":
        assert "holds model.embed_tokens.weight of shape (128, 1984); allowed: (1984, 128)" in line
    else:
        assert f"model {str(file.parent)!r} cannot be loaded: " in line


TEMPLATES = {
    "reaches for the system": "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}",
    "climbs": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "counts for ever": "{% for i in range(9999999999) %}x{% endfor %}",
    "refuses": "{{ raise_exception('no') }}",
    "is cut": "{% if",
}

BROKEN_FILES: dict[str, tuple[str, Any]] = {
    **{
        f"a template that {name}": ("tokenizer_config.json", {"chat_template": text})
        for name, text in TEMPLATES.items()
    },
    "an end token that is a number": ("tokenizer_config.json", {"eos_token": 5}),
    "a length that is text": ("tokenizer_config.json", {"model_max_length": "x"}),
    "a vocabulary that is none": ("tokenizer.json", []),
    "an end that is text": ("generation_config.json", {"eos_token_id": "abc"}),
    "an end that is half a token": ("generation_config.json", {"eos_token_id": [1.5]}),
    "a list of settings": ("generation_config.json", [1]),
}


@pytest.mark.parametrize("kind", BROKEN_FILES)
def test_odd_tokenizers_and_settings_are_one_line_and_run_nothing(
    tmp_path: Path, no_pickle: None, kind: str
) -> None:
    folder = copied(tmp_path / "model")
    name, content = BROKEN_FILES[kind]
    text = json.dumps(content).replace("MARK", str(tmp_path / "owned"))
    if isinstance(content, dict):
        changed(folder / name, **json.loads(text))
    else:
        (folder / name).write_text(text)
    assert "was opened" not in refused(folder)
    assert not (tmp_path / "owned").exists()


def test_a_template_without_end_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.engine.loading.TEMPLATE_S", 0.05)
    folder = copied(tmp_path / "model")
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    changed(folder / "tokenizer_config.json", chat_template=loops)
    assert "writing one message took more than 0.05 s" in refused(folder)


PRINTS: dict[str, tuple[str, str]] = {
    "twice": (
        "{% for m in messages %}[{{ m['content'] }}] {{ m['content'] }}{% endfor %}",
        "2 times",
    ),
    "never": ("{% for m in messages %}<user>{% endfor %}<bot>", "0 times, or changes it"),
    "in small letters": ("{{ messages[0]['content'] | lower }}", "0 times, or changes it"),
    "its start": ("{{ messages[0]['content'][:10] }}", "0 times, or changes it"),
}


@pytest.mark.parametrize("kind", PRINTS)
def test_a_template_that_does_not_print_a_message_once_is_refused(
    tmp_path: Path, kind: str
) -> None:
    template, times = PRINTS[kind]
    folder = copied(tmp_path / "model")
    changed(folder / "tokenizer_config.json", chat_template=template)
    line = refused(folder)
    assert f"prints a message {times}; allowed: once, as it is" in line
    assert loading._MARK not in line


def test_what_a_template_puts_around_a_message_is_all_that_it_adds(tmp_path: Path) -> None:
    folder = copied(tmp_path / "model")
    template = "<u>{% for m in messages %}{{ m['content'] | trim }}{% endfor %}</u>"
    changed(folder / "tokenizer_config.json", chat_template=template)
    spec = ModelSpec(name="m", path=str(folder))
    tokenizer = load_tokenizer(spec)
    encoder = prompt_encoder(tokenizer, spec)
    around = [tokenizer.decode(list(ids)) for ids in (encoder.prefix_ids, encoder.suffix_ids)]
    assert around == ["<u>", "</u>"]


PATTERN = {
    "that is none": ("(", "cannot be loaded: Exception: Oniguruma error"),
    "that a text breaks": ("(a+a+)+b", "PanicException: Onig: Regex search error: retry-limit"),
}


@pytest.mark.parametrize("kind", PATTERN)
def test_a_bad_pattern_of_a_tokenizer_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    pattern, says = PATTERN[kind]
    folder = copied(tmp_path / "model")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    changed(folder / "tokenizer.json", pre_tokenizer={**split, "invert": False})
    spec = ModelSpec(name="m", path=str(folder))
    with pytest.raises((ModelError, TaskError)) as error:
        prompt_encoder(load_tokenizer(spec), spec).encode_text("a" * 40 + " aab " * 10)
    assert says in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert "panicked" not in capfd.readouterr().err


def test_what_is_said_on_stderr_while_tokenising_is_not_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with tokenizing(None):
        os.write(2, b"a warning\n")

    def encode() -> None:
        with tokenizing(None):
            os.write(2, b"and another\n")
            raise KeyError("x")

    with pytest.raises(TaskError, match="cannot encode a text: KeyError: 'x'"):
        encode()
    assert capfd.readouterr().err == "a warning\nand another\n"


def test_a_text_of_hundreds_of_megabytes_is_not_tokenised() -> None:
    class Never:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("tokenised")

        decode = __call__ = encode

    text = "words " * 34_000_000
    for encode in (
        PromptEncoder(Never()).encode_text,
        lambda t: PromptEncoder(Never()).encode_prompt(t, 3, special=True),
        lambda t: compare(None, Never(), t, ["exact"]),
    ):
        with pytest.raises(
            TaskError, match=r"a prompt of 204000000 characters, 'words words .* most"
        ):
            encode(text)


def test_layers_without_end_are_refused_before_their_lists_are_made(tmp_path: Path) -> None:
    folder = copied(tmp_path / "model")
    changed(folder / "config.json", num_hidden_layers=10**9)
    assert "num_hidden_layers of model " in refused(folder)
    fields = {"model_type": "qwen2", "num_hidden_layers": 10**9, "max_window_layers": 3}
    spec = ModelSpec(name="m", path="none", architecture=fields, random_weights=True)
    with pytest.raises(ModelError, match=r"num_hidden_layers .* is 1000000000; allowed: at most"):
        load_config(spec)


def test_random_weights_that_no_memory_holds_are_refused_before_they_are_drawn() -> None:
    fields = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 2000}
    fields |= {"intermediate_size": 65536, "vocab_size": 100}
    spec = ModelSpec(name="huge", path="none", architecture=fields, random_weights=True)
    with pytest.raises(ModelError, match=r"model 'huge' has \d+ GB of weights and cpu \d+ GB"):
        load_model(spec, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("field", ["name", "path"])
@pytest.mark.parametrize("value", ["", "  ", None, 3])
def test_a_model_has_a_name_and_a_path(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"model.{field} is .*; allowed: text that is not empty"):
        ModelSpec(**{"name": "m", "path": "p", field: value})


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with socket.socket() as closed:  # nobody listens at its port
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}"
        )
        for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        spec = ModelSpec(name="m", path="nobody/has-this")
        begun = time.monotonic()
        for load in (load_tokenizer, load_config):
            with pytest.raises(ModelError, match="nobody/has-this' cannot be loaded: ") as error:
                load(spec)
            assert "\n" not in str(error.value)
    assert time.monotonic() - begun < 15
    assert "Retry" not in capfd.readouterr().err + caplog.text


def test_an_end_token_that_the_model_does_not_have_ends_nothing() -> None:
    stopping = Stopping(1, end_ids=frozenset({-1, 2, 10**9}), may_be_empty=False)
    logits = torch.tensor([[0.0, 1.0, 5.0]])
    assert stopping.first(logits).argmax() == 1


def test_what_is_no_model_file_is_a_bug_and_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the libraries say of files becomes a line; our own mistakes keep their traceback."""

    def mistaken(*_: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(loading, "check_serves_interface", mistaken)
    with pytest.raises(AssertionError):
        loaded(copied(tmp_path / "model"))
