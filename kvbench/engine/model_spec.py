"""The choice of a model, its device and its dtype, and the place of its files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from transformers.utils import logging as library_logging

from kvbench.engine.device import is_out_of_memory
from kvbench.engine.packaged import (
    PACKAGE_PREFIX,
    Shipped,
    is_installed,
    missing_line,
    unpacked,
)
from kvbench.errors import UserError, first_line, one_line, traceback_of
from kvbench.errors.options import Text, check_options
from kvbench.hub import hub_answers, quiet_hub

log = logging.getLogger(__name__)

ASSET_PREFIX = "asset:"
"""``path: asset:recall_mini`` names a model that ships with the package."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(UserError, ValueError):
    """A user-facing error about a model: one line naming the thing, its value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model, and how to load it (one YAML in conf/model each).

    Attributes:
        name: what tables and folders call it.
        path: ``asset:<name>`` (shipped), a local folder, a Hub id, or a GGUF file that installed
            packages hold, ``package:<package>/<file>`` (:mod:`kvbench.engine.packaged`).
        otherwise: the path to take where `path` is of a package that is not installed.
        revision: Hub revision; recorded with every result.
        tokenizer: another path for the tokenizer; None: the model's own.
        chat_template: "auto" (used when the tokenizer has one), "always" or "never"; or the text of
            a Jinja template, for a chat model whose tokenizer has none.
        enable_thinking: passed to the chat template; None: its own default.
        answer_after: the text that ends what the model thinks before it answers. Every task scores what
            follows it; an answer without it is an unfinished thought and scores as an empty one. The
            thought stays in the record (``thought``), and its tokens count. Within it only the model's
            own end tokens end a generation. "auto": ``</think>`` where the chat template has it, unless
            the prompt ends with it; an answer that does not begin with ``<think>`` (in the prompt or by
            itself) is then scored whole. "never": everything is scored.
        max_input: prompt tokens that benchmarks truncate to; None: what the protocol says.
        stop_tokens: tokens that end an answer beside the tokenizer's end token.
        dtype: of the weights where the job's `dtype` is auto and the device is CUDA; "auto": bfloat16.
        config: fields of the model's own config to be changed ({sliding_window: null}); None: none.
        random_weights: build `architecture` (or the path's config) with random weights: for speed
            and memory measurements without a download.
        architecture: a transformers config: `model_type`, which says before anything is downloaded what
            `config` may change, and the fields that `random_weights` needs.
        device_map, max_memory: accelerate's, "auto" or a device by module, and what "auto" may use of
            each device; None: one device. Where a model lies is not part of a run's hash.
        trust_remote_code: run code from the model repository. Off unless written in a config.
        quantization, gguf_file: packed weights: "bnb4" and "bnb8" pack them while they are read, "gguf"
            reads them from that file of `path` (None: the only one of a folder).
    """

    name: Text
    path: Text
    otherwise: Text | None = None
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str = "auto"
    enable_thinking: bool | None = None
    answer_after: Text = "auto"
    max_input: Annotated[int, Ge(2)] | None = None
    stop_tokens: Sequence[str] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    config: Mapping[str, Any] | None = field(default_factory=dict)
    random_weights: bool = False
    architecture: Mapping[str, Any] | None = None
    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[Any, Any] | None = None
    trust_remote_code: bool = False
    quantization: Literal["bnb4", "bnb8", "gguf"] | None = None
    gguf_file: Text | None = None

    def __post_init__(self) -> None:
        check_options(self, "model.", ModelError)
        object.__setattr__(self, "config", dict(self.config or {}))
        # The path is chosen here, so that records and hashes contain the one that is used.
        absent = self.path.startswith(PACKAGE_PREFIX) and not is_installed(self.path)
        if self.otherwise is not None and absent:
            log.warning("%s; taking %s of the Hub", missing_line(self.path), self.otherwise)
            object.__setattr__(self, "path", self.otherwise)
        object.__setattr__(self, "otherwise", None)
        for name in ("quantization", "device_map") if self.random_weights else ():
            if (value := getattr(self, name)) not in (None, "auto"):
                raise ModelError(
                    f"model.{name} is {value!r} and model.random_weights is true; allowed: null, since "
                    "only weights that are read from files are packed or spread over devices"
                )
        if self.gguf_file is not None and self.quantization != "gguf":
            raise ModelError(
                f"model.gguf_file is {self.gguf_file!r} and model.quantization {self.quantization!r}; "
                "allowed: model.quantization=gguf"
            )
        if self.chat_template not in ("auto", "always", "never") and "{" not in self.chat_template:
            raise ModelError(
                f"model.chat_template is {self.chat_template!r}; allowed: auto, always, never, "
                "or a Jinja template"
            )

    @property
    def label(self) -> str:
        """What folders, tables and pages call the model: its name, and how its weights were packed."""
        if self.path.startswith(PACKAGE_PREFIX):  # weights of another precision than the Hub's
            return f"{self.name}-{Shipped.of(self.path).quantized_as}"
        packed = self.quantization if self.gguf_file is None else Path(self.gguf_file).stem
        return self.name if packed is None else f"{self.name}-{packed}"


def resolve_device(device: str) -> torch.device:
    """``auto`` is the first CUDA device, or the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device is {device!r}; allowed: auto, cpu, mps, cuda, cuda:N") from error
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(
            f"device is {device!r}, which this torch does not have; allowed: auto, cpu"
        )
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device is {device!r}; this machine has {torch.cuda.device_count()} GPUs")
    return resolved


def resolve_dtype(dtype: str, device: torch.device, models: str = "auto") -> torch.dtype:
    """``auto`` is float32 on the CPU and mps; on CUDA what `models` (`ModelSpec.dtype`) says, else
    bfloat16."""
    if dtype == "auto":
        dtype = "float32" if device.type in ("cpu", "mps") else models.replace("auto", "bfloat16")
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def local_path(path: str) -> str:
    """The folder of `path` on this machine; a Hub id is returned unchanged."""
    if path.startswith(ASSET_PREFIX):
        asset = Path(str(files("kvbench"))) / "assets" / path.removeprefix(ASSET_PREFIX)
        if not (asset / "config.json").is_file():
            shipped = sorted(p.parent.name for p in asset.parent.glob("*/config.json"))
            raise ModelError(
                f"model path {path!r} does not ship with this package; "
                f"allowed: {', '.join(ASSET_PREFIX + name for name in shipped) or 'none'}"
            )
        return str(asset)
    if path.startswith(PACKAGE_PREFIX):
        return str(unpacked(path))
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    if looks_local and not ((folder / "config.json").is_file() or any(folder.glob("*.gguf"))):
        raise ModelError(f"model path {path!r} has no config.json; allowed: a folder with a model")
    return str(folder) if looks_local else path


@contextmanager
def one_line_failures(what: str, spec: ModelSpec) -> Iterator[None]:
    """Turn errors of the Hub and of loading within this context into one line that says what to do. The
    progress bars of transformers ("Loading weights") are hidden unless they go to a terminal.

    Args:
        what: the beginning of the message.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        StrictDataclassFieldValidationError,
    )

    hides_bars = library_logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hides_bars:
        library_logging.disable_progress_bar()
    try:
        with quiet_hub():
            yield
    except ModelError:
        raise
    except Exception as error:  # anything that libraries raise for damaged files
        text = str(error)
        if isinstance(error, GatedRepoError) or "gated repo" in text.lower():
            line = (
                "is gated: accept its licence on its Hub page, then set HF_TOKEN to a token that may "
                "read it"
            )
        elif isinstance(error, RepositoryNotFoundError):
            line = "is not on the Hub, or is private: check the name, or set HF_TOKEN"
        elif "trust_remote_code" in text:
            line = (
                "brings code of its own; allowed: a model that transformers knows, or "
                "model.trust_remote_code=true to run that code"
            )
        elif is_out_of_memory(error):
            line = (
                "does not fit into memory; allowed: a smaller model, dtype=bfloat16, or "
                "model.device_map=auto over several devices"
            )
        elif isinstance(error, StrictDataclassFieldValidationError):  # a wrong type in its config
            line = f"cannot be loaded: {one_line(error.__cause__ or error)}"
        else:
            log.debug("%s", traceback_of(error))
            known = isinstance(error, OSError | ValueError)
            line = f"cannot be loaded: {first_line(error) if known else one_line(error)}"
        raise ModelError(f"{what} {spec.path!r} {line}") from error
    finally:
        if hides_bars:
            library_logging.enable_progress_bar()


def origin_of(path: str, revision: str | None) -> dict[str, Any]:
    """The arguments of transformers' loaders for the revision, and for loading from this machine alone:
    that is so where `path` is a folder, or where the Hub does not answer (transformers would retry for
    half a minute)."""
    local = local_path(path) != path or Path(path).exists() or not hub_answers()
    return {"revision": revision, "local_files_only": local}


def gguf_options(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of transformers' loaders (config, tokenizer, weights) that name a GGUF file; none
    for other models.
    """
    if spec.quantization != "gguf":
        return {}
    if spec.gguf_file is not None:
        return {"gguf_file": spec.gguf_file}
    files = sorted(path.name for path in Path(local_path(spec.path)).glob("*.gguf"))
    if len(files) != 1:
        choices = ", ".join(files) or "those of the model's repository"
        raise ModelError(
            f"model.quantization is gguf and model {spec.path!r} has {len(files) or 'no'} such files "
            f"on this machine; allowed: model.gguf_file=<one of: {choices}>"
        )
    return {"gguf_file": files[0]}
