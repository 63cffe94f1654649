"""A model's tokenizer, its chat template, and the tokens that end an answer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvbench.engine.limits import in_main_thread, time_limit
from kvbench.engine.loading import (
    ModelError,
    ModelSpec,
    _only_local,
    checked_config,
    local_path,
    one_line_failures,
)
from kvbench.engine.quantized import gguf_options
from kvbench.errors import complain
from kvbench.tasks.base import PromptEncoder, tokenizing

Tokenizer = PreTrainedTokenizerBase


_MARK = "KVBENCH_PROMPT_GOES_HERE"


TEMPLATE_S = 5.0
"""Time limit of a chat template for one message; some never end."""


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or the one `spec.tokenizer` names."""
    with one_line_failures("tokenizer of model", spec):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            local_path(spec.tokenizer or spec.path),
            revision=None if spec.tokenizer else spec.revision,
            trust_remote_code=spec.trust_remote_code,
            local_files_only=_only_local(spec.tokenizer or spec.path),
            **({} if spec.tokenizer else gguf_options(spec)),
        )
    if spec.own_template:
        tokenizer.chat_template = spec.chat_template
    return tokenizer


def prompt_encoder(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> PromptEncoder:
    """How prompts become token ids: the chat template around them, or the tokenizer's own BOS.

    Raises:
        ModelError: `chat_template: always` and the tokenizer has none.
    """
    with one_line_failures("tokenizer of model", spec):
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
            one_line_failures("chat template of model", spec),
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
    """The encoder with the facts about the model that benchmark protocols use.

    Raises:
        ModelError: a stop token that the tokenizer does not have.
    """
    config = checked_config(spec).get_text_config()
    chat = bool(getattr(tokenizer, "chat_template", None)) and spec.chat_template != "never"
    positions = getattr(config, "max_position_embeddings", None)
    return replace(
        encoder,
        family=str(config.model_type),
        chat=chat,
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
    """Tokens that end a generation, by the model's configs.

    Raises:
        ModelError: a config names something that is no token.
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
