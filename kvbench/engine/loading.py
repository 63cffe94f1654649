"""Models and tokenizers: the shipped one, local folders, the Hub, or random weights.

Nothing is unpickled: weights are read from safetensors files, or by transformers' own loader of GGUF
files; bitsandbytes packs the former while they are read.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils import cached_file
from transformers.utils import logging as library_logging

from kvbench.engine.architecture import check_serves_interface, kv_heads
from kvbench.engine.attention import IMPLEMENTATION, register
from kvbench.engine.faults import is_out_of_memory
from kvbench.engine.packaged import (
    PACKAGE_PREFIX,
    missing_line,
    packaged_file,
    unpacked,
    unpacking,
)
from kvbench.engine.states import is_hybrid
from kvbench.errors import UserError, first_line, one_line, traceback_of
from kvbench.errors.options import Text, check_options
from kvbench.tasks.base import PromptEncoder, tokenizing
from kvbench.tasks.data import hub_answers, quiet_hub

log = logging.getLogger(__name__)

Model = PreTrainedModel
Tokenizer = PreTrainedTokenizerBase

ASSET_PREFIX = "asset:"
"""``path: asset:recall_mini`` names a model that ships with the package."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_MARK = "KVBENCH_PROMPT_GOES_HERE"


class ModelError(UserError, ValueError):
    """A user-facing error about a model: one line naming the thing, its value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model, and how to load it (one YAML in conf/model each).

    Attributes:
        name: what tables and folders call it.
        path: ``asset:<name>`` (shipped), a local folder, a Hub id, or a GGUF file that an installed
            package holds, ``package:<package>/<file>``.
        otherwise: the path to take where `path` is of a package that is not installed.
        revision: Hub revision; recorded with every result.
        tokenizer: another path for the tokenizer; None: the model's own.
        chat_template: "auto" (used when the tokenizer has one), "always" or "never"; or the text of
            a Jinja template, for a chat model whose tokenizer has none.
        max_input: prompt tokens that benchmarks truncate to, None for what the protocol says.
        stop_tokens: tokens that end an answer beside the tokenizer's end token (end of turn).
        dtype: of the weights where the job's `dtype` is auto and the device is CUDA; "auto": bfloat16.
        config: fields of the model's own config to be changed ({sliding_window: null}); None: none.
        random_weights: build `architecture` (or the path's config) with random weights: for speed
            and memory measurements without a download.
        architecture: a transformers config: `model_type`, which says before anything is downloaded what
            `config` may change, and the fields that `random_weights` needs.
        device_map, max_memory: accelerate's, "auto" or a device by module, and what "auto" may use of
            each device; None: one device. Where a model lies is not part of a run's hash.
        parallel: "tensor" divides weights and KV heads among the processes that torchrun starts
            (transformers from 5.17 on). Each makes its own draws: others than one process would make.
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
    max_input: Annotated[int, Ge(2)] | None = None
    stop_tokens: Sequence[str] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    config: Mapping[str, Any] | None = field(default_factory=dict)
    random_weights: bool = False
    architecture: Mapping[str, Any] | None = None
    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[Any, Any] | None = None
    parallel: Literal["tensor"] | None = None
    trust_remote_code: bool = False
    quantization: Literal["bnb4", "bnb8", "gguf"] | None = None
    gguf_file: Text | None = None

    def __post_init__(self) -> None:
        check_options(self, "model.", ModelError)
        object.__setattr__(self, "config", dict(self.config or {}))
        # Which path is decided here, so that records and hashes hold the one that is taken.
        absent = self.path.startswith(PACKAGE_PREFIX) and packaged_file(self.path) is None
        if self.otherwise is not None and absent:
            log.warning("%s; taking %s of the Hub", missing_line(self.path), self.otherwise)
            object.__setattr__(self, "path", self.otherwise)
        object.__setattr__(self, "otherwise", None)
        for name in ("quantization", "parallel", "device_map") if self.random_weights else ():
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
    def place(self) -> tuple[int, int]:
        """This process's number among those that share the model, and how many torchrun started."""
        named: Mapping[str, str] = os.environ if self.parallel is not None else {}
        return int(named.get("RANK", 0)), int(named.get("WORLD_SIZE", 1))

    @property
    def label(self) -> str:
        """What folders, tables and pages call the model: its name, and how its weights were packed."""
        if self.path.startswith(PACKAGE_PREFIX):  # weights of another precision than the Hub's
            return f"{self.name}-{Path(self.path).stem.rpartition('.')[2]}"
        packed = self.quantization if self.gguf_file is None else Path(self.gguf_file).stem
        return self.name if packed is None else f"{self.name}-{packed}"


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
    if dtype == "auto":
        dtype = "float32" if device.type in ("cpu", "mps") else models.replace("auto", "bfloat16")
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
    if path.startswith(PACKAGE_PREFIX):
        return str(unpacked(path))
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    if looks_local and not ((folder / "config.json").is_file() or any(folder.glob("*.gguf"))):
        raise ModelError(f"model path {path!r} has no config.json; allowed: a folder with a model")
    return str(folder) if looks_local else path


@contextmanager
def one_line_failures(what: str, spec: ModelSpec) -> Iterator[None]:
    """Turn failures of the Hub and of loading into one line that says what to do; transformers' bars
    ("Loading weights") are for a terminal."""
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


def load_config(spec: ModelSpec) -> PreTrainedConfig:
    """The transformers config of a model that kvbench can run: `architecture`, or the one of its path.

    Raises:
        ModelError: it cannot be loaded, or its fields are not those of a model.
        UnsupportedModel: see `check_serves_interface`.
    """
    config: PreTrainedConfig
    if spec.architecture is not None:
        with one_line_failures("model", spec):
            fields = {**spec.architecture, **(spec.config or {})}
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        path = Path(local_path(spec.path))
        if spec.quantization != "gguf" and path.is_dir() and not (path / "config.json").is_file():
            raise ModelError(
                f"model path {spec.path!r} has no config.json but GGUF files; allowed: "
                "model.quantization=gguf"
            )
        where = {**_origin(spec.path, spec.revision), **_gguf_options(spec)}
        with one_line_failures("model", spec):
            config = AutoConfig.from_pretrained(
                str(path), trust_remote_code=spec.trust_remote_code, **where, **(spec.config or {})
            )
        _check_fields(spec, config)
    check_serves_interface(config)
    return config


def check_config_class(spec: ModelSpec) -> str:
    """The name of the class of the model's config, which has the fields that `ModelSpec.config` changes;
    empty where `architecture` does not say it, so that only the model's own files do. Reads no file.

    Raises:
        ModelError: the class does not have such a field.
    """
    model_type = str((spec.architecture or {}).get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return ""
    config = CONFIG_MAPPING[model_type]()
    _check_fields(spec, config)
    return type(config).__name__


def _check_fields(spec: ModelSpec, config: PreTrainedConfig) -> None:
    for name in spec.config or {}:
        if not hasattr(config, name):
            raise ModelError(
                f"model.config names {name!r}, which {type(config).__name__} does not have; "
                "allowed: fields of the model's own config"
            )


def _origin(path: str, revision: str | None) -> dict[str, Any]:
    """Arguments of the library's loaders: the revision, and whether to look on this machine only:
    `path` is a folder, or the Hub cannot be reached (which it would retry for half a minute)."""
    local = local_path(path) != path or Path(path).exists() or not hub_answers()
    return {"revision": revision, "local_files_only": local}


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
    # The weights of files go into the config that lies beside them.
    config = load_config(spec if spec.random_weights else replace(spec, architecture=None))
    with one_line_failures("model", spec):
        if spec.random_weights:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                with device:
                    model = AutoModelForCausalLM.from_config(
                        config, dtype=dtype, attn_implementation=IMPLEMENTATION
                    )
        else:
            model = _with_weights(spec, config, device, dtype)
    placed = spec.device_map is not None or spec.parallel or spec.quantization in ("bnb4", "bnb8")
    if spec.random_weights or not placed:
        model = model.to(device)
    return model.eval()


def _with_weights(
    spec: ModelSpec, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> Any:
    """The model with the weights of its files; incomplete files are refused: the library would draw
    what is missing at random.

    Raises:
        ModelError: naming the first weight that is missing or has another shape.
    """
    packed = _packing(spec, device, dtype)
    if "gguf_file" not in packed:
        _check_safetensors(spec, config)
    place = spec.device_map
    options: dict[str, Any] = {
        **_origin(spec.path, spec.revision or "main"),  # else the library converts other formats
        "device_map": dict(place) if isinstance(place, Mapping) else place,
        "max_memory": None if spec.max_memory is None else dict(spec.max_memory),
        **packed,
        **_divided(spec, config.get_text_config()),
    }
    verbosity = library_logging.get_verbosity()
    library_logging.set_verbosity_error()  # what is wrong with a checkpoint becomes a line of ours
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            local_path(spec.path),
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported in `found`, and refused below
            output_loading_info=True,
            **options,
        )
    finally:
        library_logging.set_verbosity(verbosity)
    model, report = loaded
    for name, shape, wanted in sorted(report["mismatched_keys"], key=lambda entry: entry[0])[:1]:
        raise ModelError(
            f"model {spec.path!r} holds {name} of shape {tuple(shape)}; allowed: {tuple(wanted)}, as "
            "its config says"
        )
    missing = report["missing_keys"]
    if missing:
        raise ModelError(
            f"model {spec.path!r} lacks {len(missing)} weights, e.g. {min(missing)}; allowed: a "
            "folder with all of them"
        )
    model_end_ids(model)
    return model


def _divided(spec: ModelSpec, config: PreTrainedConfig) -> dict[str, Any]:
    """What `from_pretrained` is told where several processes share a model with this text config.

    Raises:
        ModelError: its KV heads cannot be divided among them.
    """
    if spec.parallel is None:
        return {}
    plan, heads, (_, ranks) = config.base_model_tp_plan or {}, kv_heads(config), spec.place
    whole = is_hybrid(config) or plan.get("layers.*.self_attn.k_proj") != "colwise"
    allowed = [n for n in range(2, heads + 1) if heads % n == 0 and not whole]
    if ranks not in allowed:
        raise ModelError(
            f"model.parallel is 'tensor' and torchrun --nproc-per-node is {ranks}; allowed for "
            f"{spec.path!r}: {' or '.join(map(str, allowed)) or 'model.parallel=null'}"
        )
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def _check_safetensors(spec: ModelSpec, config: PreTrainedConfig) -> None:
    """Refuse a model whose index or config names weight files that are not safetensors. The library's
    ``use_safetensors`` checks only the name of the first file, and would unpickle the others.

    Raises:
        ModelError: naming the file.
    """
    named = getattr(config, "transformers_weights", None) or "model.safetensors.index.json"
    names = [named.removesuffix(".index.json")]
    index = cached_file(
        local_path(spec.path),
        named if named.endswith(".index.json") else "model.safetensors.index.json",
        **_origin(spec.path, spec.revision or "main"),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if index is not None:
        names += json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    for file in names:
        if not file.endswith(".safetensors"):
            raise ModelError(
                f"model {spec.path!r} keeps weights in {file!r}; allowed: safetensors files, since "
                "others may run code when they are read"
            )


def _gguf_options(spec: ModelSpec) -> dict[str, Any]:
    """What transformers' loaders of config, tokenizer and weights are told; nothing without GGUF.

    Raises:
        ModelError: there is no one file.
    """
    if spec.quantization != "gguf":
        return {}
    if spec.gguf_file is not None:
        return {"gguf_file": spec.gguf_file}
    there = sorted(path.name for path in Path(local_path(spec.path)).glob("*.gguf"))
    if len(there) != 1:
        of = ", ".join(there) or "those of the model's repository"
        raise ModelError(
            f"model.quantization is gguf and model {spec.path!r} has {len(there) or 'no'} such files "
            f"on this machine; allowed: model.gguf_file=<one of: {of}>"
        )
    return {"gguf_file": there[0]}


def _packing(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is told of quantized weights. bitsandbytes packs them while reading, as
    its 4 bits "nf4" (QLoRA, 2305.14314, section 3), and computes in `dtype`; GGUF's blocks are unpacked
    to `dtype` at once, so that no kernel is fetched from the Hub."""
    if spec.quantization is None:
        return {}
    if spec.quantization == "gguf":
        return {**_gguf_options(spec), **unpacking()}
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    how = four if spec.quantization == "bnb4" else {"load_in_8bit": True}
    placed = {} if spec.device_map is not None else {"device_map": {"": str(device)}}
    return {"quantization_config": BitsAndBytesConfig(**how), **placed}


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or the one `spec.tokenizer` names."""
    path = spec.tokenizer or spec.path
    with one_line_failures("tokenizer of model", spec):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            local_path(path),
            trust_remote_code=spec.trust_remote_code,
            **_origin(path, None if spec.tokenizer else spec.revision),
            **({} if spec.tokenizer else _gguf_options(spec)),
        )
    if not spec.tokenizer and (spec.quantization == "gguf" or spec.path.startswith(PACKAGE_PREFIX)):
        end = getattr(load_config(spec).get_text_config(), "eos_token_id", None)
        if isinstance(end, int):  # transformers 5.17 reads another
            tokenizer.eos_token_id = end
    if "{" in spec.chat_template:  # a template itself
        tokenizer.chat_template = spec.chat_template
    return tokenizer


def prompt_encoder(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> PromptEncoder:
    """How prompts become token ids: the chat template around them, or the tokenizer's own BOS.

    Raises:
        ModelError: `chat_template: always` and the tokenizer has none; a template that does not write a
            message once, as it is; a stop token that the tokenizer does not have.
    """
    vocabulary = tokenizer.get_vocab() if spec.stop_tokens else {}
    for token in spec.stop_tokens:
        if token not in vocabulary:
            raise ModelError(
                f"model.stop_tokens names {token!r}, which the tokenizer of {spec.path!r} does not "
                "have; allowed: tokens of its vocabulary"
            )
    ends = {vocabulary[token] for token in spec.stop_tokens}
    end = getattr(tokenizer, "eos_token_id", None)
    made = PromptEncoder(tokenizer, end_ids=frozenset(ends if end is None else {*ends, end}))

    def encode(text: str, *, special: bool = False) -> list[int]:
        with one_line_failures("tokenizer of model", spec), tokenizing(tokenizer):
            return list(tokenizer.encode(text, add_special_tokens=special))

    has_template = bool(getattr(tokenizer, "chat_template", None))
    if spec.chat_template == "always" and not has_template:
        raise ModelError(
            f"model.chat_template is 'always' and the tokenizer of {spec.path!r} has none; "
            "allowed: auto, never"
        )
    if not has_template or spec.chat_template == "never":
        plain, whole = encode("a"), encode("a", special=True)
        before_text = whole.index(plain[0]) if plain and plain[0] in whole else 0
        return replace(made, prefix_ids=tuple(whole[:before_text]))
    with one_line_failures("chat template of model", spec):
        text = made.render_chat(_MARK)
    times = text.count(_MARK)
    if times != 1:
        raise ModelError(
            f"the chat template of model {spec.path!r} prints a message {times} times"
            f"{'' if times else ', or changes it'}; allowed: once, as it is (or "
            "model.chat_template=never)"
        )
    before, _, after = text.partition(_MARK)
    prefix, suffix = tuple(encode(before)), tuple(encode(after))
    return replace(made, prefix_ids=prefix, suffix_ids=suffix, chat=True)


def model_encoder(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> PromptEncoder:
    """`prompt_encoder`, with the facts about the model that benchmark protocols use."""
    config = load_config(spec).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return replace(
        prompt_encoder(tokenizer, spec),
        family=str(config.model_type),
        max_input=spec.max_input,
        max_positions=positions if isinstance(positions, int) else None,
    )


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a generation: the generation config's (one or several), the tokenizer's."""
    end = tokenizer.eos_token_id
    return model_end_ids(model) | (frozenset() if end is None else {end})


def model_end_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a generation, by the model's configs.

    Raises:
        ModelError: a config names something that is no token.
    """
    ids: set[int] = set()
    for source in (model.generation_config, model.config):
        end = getattr(source, "eos_token_id", None)
        if end is None:
            continue
        tokens = list(end) if isinstance(end, list | tuple) else [end]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise ModelError(
                f"eos_token_id of model {model.name_or_path!r} is {end!r}; allowed: a token's number, "
                "or a list of them"
            )
        ids.update(tokens)
    return frozenset(ids)
