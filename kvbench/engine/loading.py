"""Models and tokenizers: the shipped one, local folders, the Hub, or random weights."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from kvbench.engine.attention import IMPLEMENTATION, UnsupportedModel, register
from kvbench.engine.faults import is_out_of_memory
from kvbench.engine.limits import in_main_thread, time_limit
from kvbench.engine.memory import total_bytes
from kvbench.engine.quiet import without_reports
from kvbench.errors import UserError, complain, first_line, one_line, traceback_of
from kvbench.tasks.base import PromptEncoder, tokenizing

log = logging.getLogger(__name__)

Model = PreTrainedModel
Tokenizer = PreTrainedTokenizerBase

ASSET_PREFIX = "asset:"
"""``path: asset:recall_mini`` names a model that ships with the package."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_MARK = "KVBENCH_PROMPT_GOES_HERE"

TEMPLATE_S = 5.0
"""Seconds that a chat template may take for one message; some never end."""


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
    """

    name: str
    path: str
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str = "auto"
    max_input: int | None = None
    stop_tokens: Sequence[str] = ()
    dtype: str = "auto"
    config: Mapping[str, Any] = field(default_factory=dict)
    random_weights: bool = False
    architecture: Mapping[str, Any] | None = None
    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[Any, Any] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("name", "path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ModelError(f"model.{name} is {value!r}; allowed: text that is not empty")
        for name in ("revision", "tokenizer"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ModelError(f"model.{name} is {value!r}; allowed: text, or null")
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
        if self.max_input is not None and (
            not isinstance(self.max_input, int) or self.max_input < 2
        ):
            raise ModelError(
                f"model.max_input is {self.max_input!r}; allowed: an integer >= 2, or null"
            )
        if self.dtype not in ("auto", *DTYPES):
            raise ModelError(f"model.dtype is {self.dtype!r}; allowed: auto, {', '.join(DTYPES)}")
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))

    @property
    def own_template(self) -> bool:
        """Whether `chat_template` is a template itself."""
        return "{" in self.chat_template


def resolve_device(device: str) -> torch.device:
    """``auto`` is the first CUDA device, or the CPU.

    Raises:
        ModelError: a device this machine does not have.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device is {device!r}; allowed: auto, cpu, cuda, cuda:N") from error
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device is {device!r}; this machine has {torch.cuda.device_count()} GPUs")
    return resolved


def resolve_dtype(dtype: str, device: torch.device, models: str = "auto") -> torch.dtype:
    """``auto`` is float32 on the CPU, and on CUDA what the model's config says, else bfloat16.

    Args:
        dtype: what the job asks for.
        models: `ModelSpec.dtype`.

    Raises:
        ModelError: unknown name.
    """
    if dtype == "auto" and device.type == "cpu":
        return torch.float32
    dtype = models if dtype == "auto" else dtype
    if dtype == "auto":
        return torch.bfloat16
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def local_path(path: str) -> str:
    """Where `path` is on this machine; a Hub id comes back as it is.

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
    if looks_local and not (folder / "config.json").is_file():
        raise ModelError(f"model path {path!r} has no config.json; allowed: a folder with a model")
    return str(folder) if looks_local else path


@contextmanager
def _one_line(what: str, spec: ModelSpec) -> Iterator[None]:
    """Turn the failures of the Hub and of what cannot be loaded into one line that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        StrictDataclassError,
    )

    try:
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
    except Exception as error:  # whatever the libraries make of files that are broken
        if is_out_of_memory(error):
            raise ModelError(
                f"{what} {spec.path!r} does not fit into memory; allowed: a smaller model, "
                "dtype=bfloat16, or model.device_map=auto over several devices"
            ) from error
        log.debug("%s", traceback_of(error))
        raise ModelError(f"{what} {spec.path!r} cannot be loaded: {one_line(error)}") from error


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or the one `spec.tokenizer` names."""
    with _one_line("tokenizer of model", spec):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            local_path(spec.tokenizer or spec.path),
            revision=None if spec.tokenizer else spec.revision,
            trust_remote_code=spec.trust_remote_code,
            local_files_only=_only_local(spec.tokenizer or spec.path),
        )
    if spec.own_template:
        tokenizer.chat_template = spec.chat_template
    return tokenizer


def load_config(spec: ModelSpec) -> PreTrainedConfig:
    """The model's transformers config: `architecture`, or the one of its path.

    Raises:
        ModelError: it cannot be loaded, or its fields are no model's.
    """
    if spec.architecture is None:
        return _config_of_path(spec)
    with _one_line("model", spec):
        fields = {**spec.architecture, **spec.config}
        _check_layers(fields, spec)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _config_of_path(spec: ModelSpec) -> PreTrainedConfig:
    where: dict[str, Any] = {
        "revision": spec.revision,
        "local_files_only": _only_local(spec.path),
    }
    with _one_line("model", spec):
        fields, _ = PreTrainedConfig.get_config_dict(local_path(spec.path), **where)
        _check_layers({**fields, **spec.config}, spec)
        return AutoConfig.from_pretrained(
            local_path(spec.path),
            trust_remote_code=spec.trust_remote_code,
            **where,
            **spec.config,
        )


MOST_LAYERS = 10_000
"""Of a model; its config lists each of them."""


def _check_layers(fields: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a config of which making the lists of its layers alone would take for ever.

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
    """Whether what `path` names is to be looked for on this machine only: a folder, or a Hub that
    cannot be reached, which the library would try for half a minute."""
    from huggingface_hub import constants

    if local_path(path) != path or Path(path).exists():
        return True
    if constants.is_offline_mode() or getproxies():
        return False
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or {"http": 80}.get(hub.scheme, 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=HUB_S).close()
    except OSError:
        return True
    return False


HUB_S = 5.0
"""Seconds in which the Hub has to take a connection."""


def checked_config(spec: ModelSpec) -> PreTrainedConfig:
    """`load_config`, its failures as one line, and only of what can be run.

    Raises:
        ModelError: it cannot be loaded.
        UnsupportedModel: see `check_serves_interface`.
    """
    config = load_config(spec)
    check_serves_interface(config)
    return config


def check_serves_interface(config: PreTrainedConfig) -> None:
    """Refuse architectures that compute attention themselves: nothing could be compressed there.

    Raises:
        UnsupportedModel: naming the architecture.
    """
    try:
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        return  # from_pretrained says what it is
    if not getattr(architecture, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"model type {config.model_type!r} ({architecture.__name__}) computes its attention itself "
            "instead of through transformers' attention interface; allowed: models that use it "
            "(Llama, Qwen, Mistral, Gemma, OPT, GPT-NeoX ...)"
        )


def load_model(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """The model, in evaluation mode, with kvbench's attention function.

    Args:
        seed: of the random weights; not used otherwise.

    Raises:
        ModelError: what cannot be loaded, and what to do.
    """
    register()
    config = load_config(spec) if spec.random_weights else _config_of_path(spec)
    check_serves_interface(config)
    with _one_line("model", spec):
        if spec.random_weights:
            _check_fits(config, spec, device, dtype)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                with device:
                    model = AutoModelForCausalLM.from_config(
                        config, dtype=dtype, attn_implementation=IMPLEMENTATION
                    )
        else:
            _check_safetensors(spec, config)
            with without_reports():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    local_path(spec.path),
                    config=config,
                    revision=spec.revision or "main",  # converts what is not safetensors
                    dtype=dtype,
                    attn_implementation=IMPLEMENTATION,
                    device_map=dict(spec.device_map)
                    if isinstance(spec.device_map, Mapping)
                    else spec.device_map,
                    max_memory=None if spec.max_memory is None else dict(spec.max_memory),
                    trust_remote_code=spec.trust_remote_code,
                    local_files_only=_only_local(spec.path),
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # told, and refused below
                    output_loading_info=True,
                )
            model, found = loaded
            _check_shapes(found["mismatched_keys"], spec)
            _check_whole(found["missing_keys"], spec)
            model_end_ids(model)
    if spec.device_map is None or spec.random_weights:
        model = model.to(device)
    return model.eval()


def _check_safetensors(spec: ModelSpec, config: PreTrainedConfig) -> None:
    """Refuse a model whose files name weights of another kind. The library's ``use_safetensors`` looks
    at no more than the name of the first file: what an index lists, or the config names in its place,
    it would unpickle.

    Raises:
        ModelError: naming the file.
    """
    named = getattr(config, "transformers_weights", None) or "model.safetensors.index.json"
    files = [named.removesuffix(".index.json")]
    index = cached_file(
        local_path(spec.path),
        named if named.endswith(".index.json") else "model.safetensors.index.json",
        revision=spec.revision or "main",
        local_files_only=_only_local(spec.path),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if index is not None:
        files += json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    for file in files:
        if not file.endswith(".safetensors"):
            raise ModelError(
                f"model {spec.path!r} keeps weights in {file!r}; allowed: safetensors files, since "
                "others may run code when they are read"
            )


def _check_fits(
    config: PreTrainedConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse random weights that the device cannot hold, before any is drawn.

    Raises:
        ModelError: how many bytes they have, and how many there are.
    """
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, dtype=dtype)
    needed = sum(part.numel() * part.element_size() for part in shape.parameters())
    there = total_bytes(device)
    if there is not None and needed > there:
        raise ModelError(
            f"model {spec.name!r} has {needed / 1e9:.0f} GB of weights and {device} {there / 1e9:.0f} "
            "GB of memory; allowed: a smaller model, or dtype=bfloat16"
        )


def _check_shapes(mismatched: Collection[tuple[str, Any, Any]], spec: ModelSpec) -> None:
    """Refuse weights of other shapes than the config says: the library would draw them at random.

    Raises:
        ModelError: naming the first of them.
    """
    for name, found, wanted in sorted(mismatched, key=lambda one: one[0])[:1]:
        raise ModelError(
            f"model {spec.path!r} holds {name} of shape {tuple(found)}; allowed: {tuple(wanted)}, as "
            "its config says"
        )


def _check_whole(missing: Collection[str], spec: ModelSpec) -> None:
    """Refuse a model of which weights are missing: the library would draw them at random.

    Raises:
        ModelError: naming the first of them.
    """
    if missing:
        raise ModelError(
            f"model {spec.path!r} lacks {len(missing)} weights, e.g. {min(missing)}; allowed: a "
            "folder with all of them"
        )


def prompt_encoder(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> PromptEncoder:
    """How prompts become token ids: the chat template around them, or the tokenizer's own BOS.

    Raises:
        ModelError: `chat_template: always` and the tokenizer has none.
    """
    with _one_line("tokenizer of model", spec):
        return _prompt_encoder(tokenizer, spec)


def _prompt_encoder(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> PromptEncoder:
    def encode(text: str, *, special: bool = False) -> list[int]:
        with tokenizing(tokenizer):
            return list(tokenizer.encode(text, add_special_tokens=special))

    has_template = bool(getattr(tokenizer, "chat_template", None))
    if spec.chat_template == "always" and not has_template:
        raise ModelError(
            f"model.chat_template is 'always' and the tokenizer of {spec.path!r} has none; "
            "allowed: auto, never"
        )
    if has_template and spec.chat_template != "never":
        limit = TEMPLATE_S if in_main_thread() else None
        hung = partial(complain, f"the chat template of model {spec.path!r} never ends")
        with (
            _one_line("chat template of model", spec),
            time_limit(limit, hung, "writing one message"),
        ):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
            )
        times = str(text).count(_MARK)
        if times != 1:
            raise ModelError(
                f"the chat template of model {spec.path!r} prints a message {times} times"
                f"{'' if times else ', or changes it'}; allowed: once, as it is (or "
                "model.chat_template=never)"
            )
        before, _, after = str(text).partition(_MARK)
        return PromptEncoder(
            tokenizer,
            tuple(encode(before)),
            tuple(encode(after)),
        )
    plain = encode("a")
    whole = encode("a", special=True)
    before_text = whole.index(plain[0]) if plain and plain[0] in whole else 0
    return PromptEncoder(tokenizer, tuple(whole[:before_text]), ())


def with_model_facts(
    encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec
) -> PromptEncoder:
    """The encoder with what benchmark protocols ask about the model.

    Raises:
        ModelError: a stop token that the tokenizer does not have.
    """
    config = checked_config(spec).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return replace(
        encoder,
        family=str(config.model_type),
        chat=bool(getattr(tokenizer, "chat_template", None)) and spec.chat_template != "never",
        max_input=spec.max_input,
        max_positions=positions if isinstance(positions, int) else None,
        end_ids=stop_token_ids(tokenizer, spec),
    )


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> frozenset[int]:
    """The tokenizer's end token and the model's `stop_tokens`.

    Raises:
        ModelError: a stop token that the tokenizer does not have.
    """
    vocabulary = tokenizer.get_vocab() if spec.stop_tokens else {}
    for token in spec.stop_tokens:
        if token not in vocabulary:
            raise ModelError(
                f"model.stop_tokens names {token!r}, which the tokenizer of {spec.path!r} does not "
                "have; allowed: tokens of its vocabulary"
            )
    ids = {vocabulary[token] for token in spec.stop_tokens}
    end = tokenizer.eos_token_id
    return frozenset(ids if end is None else {*ids, end})


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a generation: the generation config's (one or several), the tokenizer's."""
    end = tokenizer.eos_token_id
    return model_end_ids(model) | (frozenset() if end is None else {end})


def model_end_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a generation, as the model's folder says.

    Raises:
        ModelError: it names something else.
    """
    ids: set[int] = set()
    for source in (model.generation_config, model.config):
        end = getattr(source, "eos_token_id", None)
        several = list(end) if isinstance(end, list | tuple) else [] if end is None else [end]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in several):
            raise ModelError(
                f"eos_token_id of model {model.name_or_path!r} is {end!r}; allowed: a token's number, "
                "or a list of them"
            )
        ids.update(several)
    return frozenset(ids)
