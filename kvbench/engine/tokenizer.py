"""Tokenizers: the encoding of prompts, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvbench.engine.loading import load_config, model_end_ids
from kvbench.engine.model_spec import (
    ModelError,
    ModelSpec,
    gguf_options,
    local_path,
    one_line_failures,
    origin_of,
)
from kvbench.engine.packaged import PACKAGE_PREFIX
from kvbench.methods.base import Method
from kvbench.prompts import PromptEncoder, Thought

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tokenizer = PreTrainedTokenizerBase

THOUGHT = Thought("</think>", "<think>")
"""The thought of most models that think."""
MESSAGE = "KVBENCH_PROMPT_GOES_HERE"
"""A message that is passed to a chat template to find what the template writes before and after it."""


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    path = spec.tokenizer or spec.path
    with one_line_failures("tokenizer of model", spec):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
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


def stop_ids(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> set[int]:
    """The ids of `ModelSpec.stop_tokens`."""
    vocabulary = tokenizer.get_vocab() if spec.stop_tokens else {}
    for token in spec.stop_tokens:
        if token not in vocabulary:
            raise ModelError(
                f"model.stop_tokens names {token!r}, which the tokenizer of {spec.path!r} does not "
                "have; allowed: tokens of its vocabulary"
            )
    return {vocabulary[token] for token in spec.stop_tokens}


def prompt_encoder(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> PromptEncoder:
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
    with one_line_failures("chat template of model", spec):
        text = encoder.render_chat(MESSAGE)
    times = text.count(MESSAGE)
    if times != 1:
        raise ModelError(
            f"the chat template of model {spec.path!r} prints a message {times} times"
            f"{'' if times else ', or changes it'}; allowed: once, as it is (or "
            "model.chat_template=never)"
        )
    before, _, after = text.partition(MESSAGE)
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
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], methods: Iterable[Method]
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
