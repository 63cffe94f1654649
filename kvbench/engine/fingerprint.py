"""The fingerprint of a model: which weights, config and tokenizer its numbers are about.

It is of the files' content, so that the same model in another folder, in other shards or from the Hub
has the same one. Of each tensor it takes name, dtype, shape and 4 KiB from the begin, the middle and the
end: that tells trained weights from those before another training step in under a second for 16 GB, and
does not see a change of single numbers elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.engine.model import (
    ModelError,
    ModelSpec,
    gguf_options,
    local_path,
    one_line_failures,
    origin_of,
)

PIECE = 4096
INDEX = "model.safetensors.index.json"
BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template*",
)
"""The files beside the weights on which answers depend."""
OF_A_PLACE = (
    "_name_or_path",
    "name_or_path",
    "tokenizer_file",
    "_commit_hash",
    "transformers_version",
)
"""Keys of config files that say where the model lay, or who wrote the file."""


def fingerprint(spec: ModelSpec, *, fetch: bool = True) -> str | None:
    """16 hex digits of a model's files; of a model with random weights, of those beside the weights.

    Args:
        fetch: whether what is not on this machine is fetched from the Hub; else None is returned for a
            model that is not all here.

    Raises:
        ModelError: the folder has an adapter, or a file that cannot be read.
    """
    beside = (*BESIDE, *(("*.py",) if spec.trust_remote_code else ()))
    with one_line_failures("model", spec):
        try:
            folder = _folder(spec.path, spec, (*beside, "*.json"), fetch)
            tokenizer = folder
            if spec.tokenizer is not None:
                tokenizer = _folder(spec.tokenizer, spec, beside, fetch)
            weights = () if spec.random_weights else _weights(spec, folder, fetch)
        except OSError:
            if fetch:
                raise
            return None
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"model path {spec.path!r} holds an adapter, whose base may be any; allowed: a folder "
                "with the merged model (peft's merge_and_unload, then save_pretrained)"
            )
        whole = hashlib.sha256()
        for place in dict.fromkeys((folder, tokenizer)):
            for pattern in beside:
                for file in sorted(place.glob(pattern)):
                    whole.update(f"{file.name}\0".encode() + _content(file))
        tensors = [tensor for file in weights for tensor in _tensors(file)]
        for name, kind, content in sorted(tensors, key=lambda tensor: tensor[0]):
            whole.update(f"{name}\0{kind}\0".encode() + content)
        return whole.hexdigest()[:16]


def commit_of(spec: ModelSpec) -> str | None:
    """The Hub's commit of a model that is on this machine; None for folders."""
    if Path(local_path(spec.path)).is_dir():
        return None
    with suppress(OSError):
        return _folder(spec.path, spec, ("config.json",), fetch=False).name
    return None


def _folder(path: str, spec: ModelSpec, names: tuple[str, ...], fetch: bool) -> Path:
    """The folder on this machine with those of a model's files that match these names."""
    from huggingface_hub import snapshot_download

    folder = Path(local_path(path))
    if folder.is_dir():
        return folder
    here = {"revision": spec.revision, "local_files_only": True}
    origin = origin_of(path, spec.revision) if fetch else here
    return Path(snapshot_download(path, allow_patterns=list(names), **origin))


def _weights(spec: ModelSpec, folder: Path, fetch: bool) -> list[Path]:
    """The files with the weights of a model whose other files lie in `folder`."""
    if spec.quantization == "gguf":
        names = [gguf_options(spec)["gguf_file"]]
    else:
        config = folder / "config.json"
        named = (
            json.loads(config.read_bytes()).get("transformers_weights")
            if config.is_file()
            else None
        )
        index = folder / (named or INDEX)
        names = [index.name.removesuffix(".index.json")]
        if index.is_file() and index.name.endswith(".index.json"):
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    folder = _folder(spec.path, spec, tuple(names), fetch)
    files = [folder / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing and not fetch:
        raise FileNotFoundError(missing[0])
    return [file for file in files if file.is_file()]  # the loader names those that are missing


def _content(file: Path) -> bytes:
    """The bytes of a file beside the weights; of a config without what says where the model lay."""
    content = file.read_bytes()
    if file.name.endswith("config.json"):
        with suppress(ValueError):
            values = json.loads(content)
            kept = {key: value for key, value in values.items() if key not in OF_A_PLACE}
            return json.dumps(kept, sort_keys=True).encode()
    return content


def _tensors(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Each tensor of a file of weights: its name, its dtype and shape, and a digest of pieces of it. The
    metadata of a GGUF file, its config and tokenizer, are one more."""
    if file.suffix == ".gguf":
        yield from _gguf_tensors(file)
        return
    if file.suffix != ".safetensors":
        return  # the loader refuses it
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            begin, end = (8 + size + offset for offset in tensor["data_offsets"])
            pieces = _pieces(stream.fileno(), begin, end)
            yield name, f"{tensor['dtype']} {tensor['shape']}", pieces


def _gguf_tensors(file: Path) -> Iterator[tuple[str, str, bytes]]:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    first = min(int(tensor.field.offset) for tensor in reader.tensors)
    with file.open("rb") as stream:
        yield "", "metadata", hashlib.sha256(stream.read(first)).digest()
        for tensor in reader.tensors:
            begin = int(tensor.data_offset)
            pieces = _pieces(stream.fileno(), begin, begin + int(tensor.n_bytes))
            yield tensor.name, f"{tensor.tensor_type.name} {list(map(int, tensor.shape))}", pieces


def _pieces(file: int, begin: int, end: int) -> bytes:
    """The digest of `PIECE` bytes from begin, middle and end of a part of a file, or of all of it."""
    if end - begin <= 3 * PIECE:
        return hashlib.sha256(os.pread(file, end - begin, begin)).digest()
    places = (begin, begin + (end - begin - PIECE) // 2, end - PIECE)
    return hashlib.sha256(b"".join(os.pread(file, PIECE, place) for place in places)).digest()
