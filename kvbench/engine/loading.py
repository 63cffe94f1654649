"""Models and tokenizers: the shipped one, local folders, the Hub, or random weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.faults import is_out_of_memory
from kvbench.engine.states import HYBRIDS, check_hybrid
from kvbench.errors import UserError, first_line, one_line, traceback_of
from kvbench.errors.options import Text, check_options
from kvbench.tasks.hub import hub_answers, retries_announced_once

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
        path: ``asset:<name>`` (shipped), a local folder, or a Hub id.
        revision: Hub revision; recorded with every result.
        tokenizer: another path for the tokenizer; None: the model's own.
        chat_template: "auto" (used when the tokenizer has one), "always" or "never"; or the text of
            a Jinja template, for a chat model whose tokenizer has none.
        max_input: prompt tokens that benchmarks truncate to, None for what the protocol says.
        stop_tokens: tokens that end an answer beside the tokenizer's end token (end of turn).
        dtype: of the weights where the job's `dtype` is auto and the device is CUDA; "auto": bfloat16.
        config: fields of the model's own config to be changed ({sliding_window: null}).
        random_weights: build `architecture` (or the path's config) with random weights: for speed
            and memory measurements without a download.
        architecture: a transformers config (`model_type` and its fields) for `random_weights`.
        device_map: accelerate's device map ("auto" spreads over all GPUs, then the host's memory, then
            the disk; or a device by module), None for one device. Where a model lies changes no
            result, so neither this nor `max_memory` is part of a run's hash.
        max_memory: what "auto" may use of each device, e.g. ``{0: 70GiB, cpu: 200GiB}``.
        trust_remote_code: run code from the model repository. Off unless written in a config.
        quantization: of the weights, see `kvbench.engine.quantized`: "bnb4" and "bnb8" pack them while
            they are read, "gguf" reads a file that holds them packed.
        gguf_file: that file, in the folder or repository of `path`; None: the only one of a folder.
    """

    name: Text
    path: Text
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str = "auto"
    max_input: Annotated[int, Ge(2)] | None = None
    stop_tokens: Sequence[str] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    config: Mapping[str, Any] = field(default_factory=dict)
    random_weights: bool = False
    architecture: Mapping[str, Any] | None = None
    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[Any, Any] | None = None
    trust_remote_code: bool = False
    quantization: Literal["bnb4", "bnb8", "gguf"] | None = None
    gguf_file: Text | None = None

    def __post_init__(self) -> None:
        check_options(self, "model.", ModelError)
        if self.quantization is not None and self.random_weights:
            raise ModelError(
                f"model.quantization is {self.quantization!r} and model.random_weights is true; "
                "allowed: null, since only weights that are read from files are packed"
            )
        if self.gguf_file is not None and self.quantization != "gguf":
            raise ModelError(
                f"model.gguf_file is {self.gguf_file!r} and model.quantization {self.quantization!r}; "
                "allowed: model.quantization=gguf"
            )
        if self.chat_template not in ("auto", "always", "never") and not self.own_template:
            raise ModelError(
                f"model.chat_template is {self.chat_template!r}; allowed: auto, always, never, "
                "or a Jinja template"
            )
        if self.device_map not in (None, "auto") and self.random_weights:
            raise ModelError(
                f"model.device_map is {self.device_map!r} and model.random_weights is true; allowed: "
                "null or auto, since only weights that are read from files are spread over devices"
            )

    @property
    def label(self) -> str:
        """What folders, tables and pages call the model: its name, and how its weights were packed."""
        packed = self.quantization if self.gguf_file is None else Path(self.gguf_file).stem
        return self.name if packed is None else f"{self.name}-{packed}"

    @property
    def own_template(self) -> bool:
        """Whether `chat_template` is a template itself."""
        return "{" in self.chat_template


GPU_FILES = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/dxg")
"""Files that exist on a machine with an NVIDIA GPU and its driver."""


def resolve_device(device: str) -> torch.device:
    """``auto`` is the first CUDA device, or the CPU, with a warning if a GPU remains unused.

    Raises:
        ModelError: a device this machine does not have.
    """
    if device == "auto":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            available = torch.cuda.is_available()
        if not available and (said or any(Path(place).exists() for place in GPU_FILES)):
            build = f"this torch ({torch.__version__}) cannot use it"
            reason = str(said[0].message).strip().splitlines()[0] if said else build
            log.warning("device is auto and becomes cpu, although there is a GPU: %s", reason)
        return torch.device("cuda" if available else "cpu")
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
    """``auto`` is float32 on the CPU and mps; on CUDA what the model's config says, else bfloat16.

    Args:
        dtype: what the job asks for.
        models: `ModelSpec.dtype`.

    Raises:
        ModelError: unknown name.
    """
    if dtype == "auto" and device.type in ("cpu", "mps"):
        return torch.float32
    dtype = models if dtype == "auto" else dtype
    if dtype == "auto":
        return torch.bfloat16
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def local_path(path: str) -> str:
    """The folder of `path` on this machine; a Hub id is returned unchanged.

    Raises:
        ModelError: an asset or local folder that is not there.
    """
    if path.startswith(ASSET_PREFIX):
        asset = Path(str(files("kvbench"))) / "assets" / path.removeprefix(ASSET_PREFIX)
        if not (asset / "config.json").is_file():
            shipped = sorted(p.parent.name for p in asset.parent.glob("*/config.json"))
            raise ModelError(
                f"model path {path!r} does not ship with this package; "
                f"allowed: {', '.join(ASSET_PREFIX + name for name in shipped) or 'none'}"
            )
        return str(asset)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    if looks_local and not ((folder / "config.json").is_file() or any(folder.glob("*.gguf"))):
        raise ModelError(f"model path {path!r} has no config.json; allowed: a folder with a model")
    return str(folder) if looks_local else path


@contextmanager
def one_line_failures(what: str, spec: ModelSpec) -> Iterator[None]:
    """Turn failures of the Hub and of loading into one line that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        StrictDataclassError,
    )

    try:
        with retries_announced_once(f"{what} {spec.path!r}"):
            yield
    except ModelError:
        raise
    except GatedRepoError as error:
        raise ModelError(
            f"{what} {spec.path!r} is gated: accept its licence on its Hub page, then set HF_TOKEN "
            "to a token that may read it"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{what} {spec.path!r} is not on the Hub, or is private: check the name, or set HF_TOKEN"
        ) from error
    except (OSError, ValueError, StrictDataclassError) as error:
        if "gated repo" in str(error).lower():
            raise ModelError(
                f"{what} {spec.path!r} is gated: accept its licence on its Hub page, then set "
                "HF_TOKEN to a token that may read it"
            ) from error
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{what} {spec.path!r} brings code of its own; allowed: a model that transformers "
                "knows, or model.trust_remote_code=true to run that code"
            ) from error
        raise ModelError(f"{what} {spec.path!r} cannot be loaded: {first_line(error)}") from error
    except Exception as error:  # anything that libraries raise for damaged files
        if is_out_of_memory(error):
            raise ModelError(
                f"{what} {spec.path!r} does not fit into memory; allowed: a smaller model, "
                "dtype=bfloat16, or model.device_map=auto over several devices"
            ) from error
        log.debug("%s", traceback_of(error))
        raise ModelError(f"{what} {spec.path!r} cannot be loaded: {one_line(error)}") from error


def load_config(spec: ModelSpec) -> PreTrainedConfig:
    """The model's transformers config: `architecture`, or the one of its path.

    Raises:
        ModelError: it cannot be loaded, or its fields are not those of a model.
    """
    if spec.architecture is None:
        return _config_of_path(spec)
    with one_line_failures("model", spec):
        fields = {**spec.architecture, **spec.config}
        _check_layers(fields, spec)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _config_of_path(spec: ModelSpec) -> PreTrainedConfig:
    from kvbench.engine.quantized import gguf_options

    folder = Path(local_path(spec.path))
    if spec.quantization != "gguf" and folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(
            f"model path {spec.path!r} has no config.json but GGUF files; allowed: "
            "model.quantization=gguf"
        )
    where: dict[str, Any] = {
        "revision": spec.revision,
        "local_files_only": _only_local(spec.path),
        **gguf_options(spec),
    }
    with one_line_failures("model", spec):
        fields, _ = PreTrainedConfig.get_config_dict(local_path(spec.path), **where)
        _check_layers({**fields, **spec.config}, spec)
        return AutoConfig.from_pretrained(
            local_path(spec.path),
            trust_remote_code=spec.trust_remote_code,
            **where,
            **spec.config,
        )


MOST_LAYERS = 10_000
"""Most layers of a model; its config lists every layer."""


def _check_layers(fields: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a config whose list of layers alone would take very long to build.

    Raises:
        ModelError: naming the field.
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _check_layers(value, spec)
        elif "layer" in name and isinstance(value, int) and value > MOST_LAYERS:
            raise ModelError(
                f"{name} of model {spec.path!r} is {value}; allowed: at most {MOST_LAYERS}"
            )


def _only_local(path: str) -> bool:
    """Whether to look for `path` on this machine only: it is a folder, or the Hub cannot be reached
    (which the library would retry for half a minute)."""
    return local_path(path) != path or Path(path).exists() or not hub_answers()


def checked_config(spec: ModelSpec) -> PreTrainedConfig:
    """`load_config` of a model that kvbench can run.

    Raises:
        ModelError: it cannot be loaded.
        UnsupportedModel: see `check_serves_interface`.
    """
    config = load_config(spec)
    check_serves_interface(config)
    return config


def check_serves_interface(config: PreTrainedConfig) -> None:
    """Refuse architectures that compute attention themselves, where nothing could be compressed.

    Raises:
        UnsupportedModel: naming the architecture.
    """
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        architecture = mapping[type(config)]
    except KeyError:
        return  # from_pretrained says what it is
    check_hybrid(config)
    known = config.model_type in HYBRIDS
    if not known and not getattr(architecture, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"model type {config.model_type!r} ({architecture.__name__}) computes its attention itself "
            "instead of through transformers' attention interface; allowed: models that use it "
            "(Llama, Qwen, Mistral, Gemma, OPT, GPT-NeoX ...)"
        )


def full_attention_layers(spec: ModelSpec) -> list[int]:
    """Numbers from 1 of the model's layers with full attention, by its config; loads no model.

    Raises:
        ModelError, UnsupportedModel: see `checked_config`; there is none.
    """
    config = checked_config(spec).get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    found = [i for i, kind in enumerate(kinds, start=1) if kind == "full_attention"]
    if not found:
        raise UnsupportedModel(
            f"model {spec.name} has {', '.join(sorted(set(kinds)))} layers only; allowed: models with "
            "full-attention layers"
        )
    return found
