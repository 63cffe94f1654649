"""A model by its spec: where its files lie, its config, weights, tokenizer and end tokens.

Nothing is unpickled: weights are read from safetensors files, or by transformers' own loader of GGUF
files; bitsandbytes packs the former while they are read.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import torch
from annotated_types import Ge
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils import logging as library_logging

from kvbench.engine.architecture import check_supported
from kvbench.engine.device import is_out_of_memory
from kvbench.engine.packaged import (
    PACKAGE_PREFIX,
    Shipped,
    missing_line,
    unpacked,
    unpacking,
    without_warnings,
)
from kvbench.errors import UserError, first_line, one_line, traceback_of
from kvbench.errors.options import Text, check_options
from kvbench.hub import hub_answers, quiet_hub
from kvbench.methods.base import Method
from kvbench.prompts import PromptEncoder, Thought

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Model: TypeAlias = "PreTrainedModel"
Tokenizer: TypeAlias = PreTrainedTokenizerBase

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
        missing = missing_line(self.path) if self.path.startswith(PACKAGE_PREFIX) else None
        if self.otherwise is not None and missing is not None:
            log.warning("%s; taking %s of the Hub", missing, self.otherwise)
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
        """The model's name in folders, tables and pages, which also says how its weights were packed."""
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
    folder = Path(path).expanduser()
    if folder.suffix == ".gguf":
        raise ModelError(
            f"model path {path!r} is a file; allowed: its folder, with model.quantization=gguf and "
            f"model.gguf_file={folder.name}"
        )
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.is_dir()
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


# --- config and weights ---------------------------------------------------------------------------


def load_config(spec: ModelSpec) -> PreTrainedConfig:
    """The config of a model that kvbench can run: that of `architecture`, or of its path."""
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
        where = {**origin_of(spec.path, spec.revision), **gguf_options(spec)}
        with one_line_failures("model", spec):
            config = AutoConfig.from_pretrained(
                str(path), trust_remote_code=spec.trust_remote_code, **where, **(spec.config or {})
            )
        _check_fields(spec, config)
    check_supported(config)
    return config


def load_generation_config(spec: ModelSpec) -> GenerationConfig:
    """The generation config that the model will have, without its weights."""
    if not spec.random_weights:
        try:
            return GenerationConfig.from_pretrained(
                local_path(spec.path), **origin_of(spec.path, spec.revision)
            )
        except OSError:  # there is none
            pass
    return GenerationConfig.from_model_config(load_config(spec))


def check_config_class(spec: ModelSpec) -> str:
    """Check the fields that `ModelSpec.config` changes without reading a file; the name of the config's
    class, empty (and nothing checked) where `architecture` does not name the model type."""
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


def load_model(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """The model, in evaluation mode, with transformers' own attention; the seed is that of random
    weights."""
    # Weights that are read from files belong to the config beside them, not to `architecture`.
    config = load_config(spec if spec.random_weights else replace(spec, architecture=None))
    with one_line_failures("model", spec):
        if spec.random_weights:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                with device:
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = _with_weights(spec, config, device, dtype)
    placed_while_read = spec.device_map is not None or spec.quantization in ("bnb4", "bnb8")
    if spec.random_weights or not placed_while_read:
        model = model.to(device)
    return model.eval()


def _with_weights(
    spec: ModelSpec, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> Any:
    """The model with the weights of its files. Files that lack some are refused: transformers would
    initialise these at random."""
    options_of_packing = _packing(spec, device, dtype)
    if "gguf_file" not in options_of_packing:
        _check_safetensors(spec, config)
    device_map = spec.device_map
    options: dict[str, Any] = {
        # Without a revision the library would convert other formats to safetensors on the Hub.
        **origin_of(spec.path, spec.revision or "main"),
        "device_map": dict(device_map) if isinstance(device_map, Mapping) else device_map,
        "max_memory": None if spec.max_memory is None else dict(spec.max_memory),
        **options_of_packing,
    }
    with without_warnings():  # what is wrong with the weights is raised below, in one line
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            local_path(spec.path),
            config=config,
            dtype=dtype,
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused below
            output_loading_info=True,
            **options,
        )
    model, report = loaded
    if report["mismatched_keys"]:
        name, shape, wanted = min(report["mismatched_keys"], key=lambda entry: entry[0])
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
    end_token_ids(model)  # refuses what is no token
    return model


def _check_safetensors(spec: ModelSpec, config: PreTrainedConfig) -> None:
    """Refuse weight files that are not safetensors. transformers' ``use_safetensors`` checks the name of
    the first file only, and would unpickle the others."""
    named = getattr(config, "transformers_weights", None) or "model.safetensors.index.json"
    names = [named.removesuffix(".index.json")]
    index = cached_file(
        local_path(spec.path),
        named if named.endswith(".index.json") else "model.safetensors.index.json",
        **origin_of(spec.path, spec.revision or "main"),
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


def _packing(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of `from_pretrained` for quantized weights.

    bitsandbytes packs weights while they are read, in 4 bits as "nf4" (QLoRA, 2305.14314, section 3),
    and computes in `dtype`. GGUF's blocks are unpacked to `dtype` at once, so that no kernel is fetched
    from the Hub.
    """
    if spec.quantization is None:
        return {}
    if spec.quantization == "gguf":
        return {**gguf_options(spec), **unpacking()}
    if spec.quantization == "bnb4":
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    options: dict[str, Any] = {"quantization_config": config}
    if spec.device_map is None:
        options["device_map"] = {"": str(device)}
    return options


# --- tokenizer and prompts ------------------------------------------------------------------------

THOUGHT = Thought("</think>", "<think>")
"""The thought of most models that think."""
MESSAGE = "KVBENCH_PROMPT_GOES_HERE"
"""A message that is passed to a chat template to find what the template writes before and after it."""


def load_tokenizer(spec: ModelSpec) -> Tokenizer:
    path = spec.tokenizer or spec.path
    folder = Path(local_path(path))
    files = [
        file for name in ("*token*", "*vocab*", "*.model", "*.gguf") for file in folder.glob(name)
    ]
    if folder.is_dir() and not files:  # save_pretrained of the model alone
        raise ModelError(
            f"model path {path!r} has no tokenizer; allowed: model.tokenizer=<a folder or an id of the "
            "Hub>, or tokenizer.save_pretrained into it"
        )
    with one_line_failures("tokenizer of model", spec):
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            local_path(path),
            trust_remote_code=spec.trust_remote_code,
            **origin_of(path, None if spec.tokenizer else spec.revision),
            **({} if spec.tokenizer else gguf_options(spec)),
        )
    if not spec.tokenizer and (spec.quantization == "gguf" or spec.path.startswith(PACKAGE_PREFIX)):
        end = getattr(load_config(spec).get_text_config(), "eos_token_id", None)
        if isinstance(end, int):
            # transformers 5.17 reads another one from a GGUF file than the config has.
            tokenizer.eos_token_id = end
    if "{" in spec.chat_template:  # it is the text of a template
        tokenizer.chat_template = spec.chat_template
    return tokenizer


def stop_ids(tokenizer: Tokenizer, spec: ModelSpec) -> set[int]:
    """The ids of `ModelSpec.stop_tokens`."""
    vocabulary = tokenizer.get_vocab() if spec.stop_tokens else {}
    for token in spec.stop_tokens:
        if token not in vocabulary:
            raise ModelError(
                f"model.stop_tokens names {token!r}, which the tokenizer of {spec.path!r} does not "
                "have; allowed: tokens of its vocabulary"
            )
    return {vocabulary[token] for token in spec.stop_tokens}


def prompt_encoder(tokenizer: Tokenizer, spec: ModelSpec) -> PromptEncoder:
    """The encoder that puts the chat template around prompts or the tokenizer's BOS before them."""
    ends = stop_ids(tokenizer, spec)
    end = getattr(tokenizer, "eos_token_id", None)
    if end is not None:
        ends.add(end)
    encoder = PromptEncoder(
        tokenizer, end_ids=frozenset(ends), enable_thinking=spec.enable_thinking
    )

    has_template = bool(getattr(tokenizer, "chat_template", None))
    if spec.chat_template == "always" and not has_template:
        raise ModelError(
            f"model.chat_template is 'always' and the tokenizer of {spec.path!r} has none; "
            "allowed: auto, never"
        )
    has_template = has_template and spec.chat_template != "never"
    template = str(tokenizer.chat_template) if has_template else ""
    if spec.enable_thinking is not None and "enable_thinking" not in template:
        raise ModelError(
            f"model.enable_thinking is {spec.enable_thinking} and the chat template of {spec.path!r} "
            "does not ask for it; allowed: null"
        )
    if not has_template:
        begin = tuple(encoder.begin_ids)
        return replace(encoder, prefix_ids=begin, thought=_thought(spec, "", ""))
    messages = [{"role": "user", "content": MESSAGE}]
    before, after = encoder.render_around([MESSAGE], messages)
    return replace(
        encoder,
        prefix_ids=tuple(encoder.encode_text(before)),
        suffix_ids=tuple(encoder.encode_text(after)),
        before=before,
        after=after,
        chat=True,
        thought=_thought(spec, template, after),
    )


def repeating_encoder(
    tokenizer: Tokenizer, ids: Sequence[int], methods: Iterable[Method]
) -> PromptEncoder | None:
    """The encoder with which the model is asked to repeat a prompt (`Method.second_pass`), as the
    command line makes it: where the prompt is written in the tokenizer's chat template, the model
    repeats it as its own message. None where no method asks for that."""
    if all(method.second_pass is None for method in methods):
        return None
    plain = PromptEncoder(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        return plain
    name = str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__
    encoder = prompt_encoder(tokenizer, ModelSpec(name="model", path=name))
    # What the template writes before a user's message, from its last special token on: the messages
    # before that one, a system's among them, may be any. Some tokenizers decode blanks of their own.
    last = max((encoder.before.rfind(mark) for mark in tokenizer.all_special_tokens), default=-1)
    opening = "".join(encoder.before[max(0, last) :].split())
    text = "".join(str(tokenizer.decode(list(ids))).split())
    return encoder if opening and opening in text else plain


def _thought(spec: ModelSpec, template: str, after: str) -> Thought | None:
    """`ModelSpec.answer_after` under a chat template (empty for none) that writes `after` between the
    user's message and the answer."""
    start, end = "", spec.answer_after
    if end == "auto":
        if THOUGHT.end not in template:
            return None
        start, end = THOUGHT.start, THOUGHT.end
        if after.rstrip().endswith(start):
            start = ""
    over = after.rstrip().endswith(end.strip())
    return None if end == "never" or over else Thought(end, start)


def model_encoder(tokenizer: Tokenizer, spec: ModelSpec) -> PromptEncoder:
    """`prompt_encoder`, with the facts about the model that benchmark protocols use."""
    config = load_config(spec).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return replace(
        prompt_encoder(tokenizer, spec),
        family=str(config.model_type),
        max_input=spec.max_input,
        max_positions=positions if isinstance(positions, int) else None,
        vocabulary=getattr(config, "vocab_size", None),
    )


def end_token_ids(model: PreTrainedModel, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """The ids of the tokens that end a generation: the generation config's and the config's (one or
    several), and the tokenizer's."""
    end = getattr(tokenizer, "eos_token_id", None)
    ids: set[int] = set() if end is None else {end}
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
