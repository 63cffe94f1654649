"""Compressed caches inside transformers' own `generate`: the implementation of `kvbench.compress`.

A forward pre-hook on the model replaces the cache that `generate` made by a `LiveCache`, and passes the
pass of the prefill or of the decode steps to the model. A forward hook counts the tokens.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from kvbench.engine.answer import NonFiniteLogits
from kvbench.engine.architecture import compressible_layers, kvbench_attention_on
from kvbench.engine.attention import LayerCall, Pass
from kvbench.engine.context import Context, PromptText, held_after_prompt
from kvbench.engine.cost import Cost
from kvbench.engine.device import input_device
from kvbench.engine.live_cache import LiveCache, UnsupportedGeneration
from kvbench.engine.prefill import Prefill
from kvbench.engine.rotary import crossing, forget_lengths, rotary_of
from kvbench.engine.row import Row, prompt_name
from kvbench.engine.states import is_hybrid, row_of, states_in
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Lock:
    """Held while a generation runs. A deep copy of the model, which copies its hooks, gets another."""

    def __init__(self) -> None:
        self.held = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Lock:
        return _Lock()


class _BatchPrefill(Pass):
    """The prefill of a batch, in which every row is a prompt of its own.

    Args:
        padding: how many leading tokens of each row are padding.
        count: the number of tokens of each row, padding included.

    Attributes:
        prefills: that of each row.
    """

    def __init__(
        self, model: PreTrainedModel, rows: Sequence[Row], padding: Sequence[int], count: int
    ) -> None:
        layers = compressible_layers(model)
        rotary = rotary_of(model, layers, count - min(padding), input_device(model))
        self.padding = padding
        self.prefills = [Prefill([row], layers, rotary) for row in rows]

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention of each row without its padding; the output of padding is 0."""
        out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
        for place, (prefill, start) in enumerate(zip(self.prefills, self.padding, strict=True)):
            out[place : place + 1, :, start:] = prefill.attend(call.of_row(place, start))
            failure = prefill.rows[0].failure
            if failure is not None:
                raise failure
        return out


@dataclass(repr=False)
class Compression:
    """A method that compresses the caches of a model; `kvbench.compress` yields it.

    Attributes:
        label: what messages call the method.
        seed: the seed of the method's draws.
        compress_after: see `kvbench.compress`.
    """

    model: PreTrainedModel
    method: Method
    budget: Budget
    label: str
    seed: int = 0
    compress_after: str | None = None
    # The cost of every prompt so far: a list for each batch, with a cost for each row.
    _batches: list[list[Cost]] = field(default_factory=list)
    # The cache of the generation that runs, and the pass of its prefill until that is over.
    _cache: LiveCache | None = None
    _prefill: _BatchPrefill | None = None
    # The model's own `generate`.
    _original: Callable[..., Any] | None = None
    _lock: _Lock = field(default_factory=_Lock)

    def __repr__(self) -> str:
        last = f", ratio of the last {self.ratio[-1]:.3g}" if self.rows else ""
        return f"<kvbench session: {self.label}, {self.budget}; {len(self.rows)} rows{last}>"

    def __post_init__(self) -> None:
        if self.compress_after not in (None, "prompt", "context"):
            raise KVError(
                f"compress_after is {self.compress_after!r}; allowed: 'prompt' (generate reads a prompt "
                "in one pass, so that its first new token is the exact cache's; compare has "
                "'all_but_last'), or 'context', which session.read(context).ask(question) compresses "
                "before it knows the question"
            )

    def read(self, prompt: PromptText, tokenizer: PreTrainedTokenizerBase | None = None) -> Context:
        """Prefill a prompt once and compress it, so that many questions can be asked about it
        (`Context.ask`).

        Raises:
            KVError: an empty prompt, text without a tokenizer, or a `compress_after` that says
                otherwise.
        """
        if self.compress_after == "prompt":
            raise KVError(
                "compress_after is 'prompt' and a context is compressed before its questions; allowed: "
                "'context', or generate with each question in its prompt"
            )
        context = Context(
            self.model,
            self.method,
            self.budget,
            prompt,
            tokenizer,
            label=self.label,
            seed=self.seed,
        )
        self._batches.append([context.cost])
        return context

    @property
    def rows(self) -> list[Cost]:
        """The cost of the cache of every batch row of every call of `generate` and of `read` so far, in
        order. (`generate` makes a row for each beam and each returned sequence of a prompt.)"""
        return [cost for costs in self._batches for cost in costs]

    @property
    def entries(self) -> list[float]:
        """For each row the entries after compression, averaged over layers and KV heads."""
        return [held_after_prompt(row)[0]["mean"] for row in self.rows]

    @property
    def cache_bytes(self) -> list[int]:
        """For each row the bytes of the cache after compression."""
        return [held_after_prompt(row)[1] for row in self.rows]

    @property
    def exact_bytes(self) -> list[int]:
        """For each row the bytes of the exact cache at the same point."""
        return [row.exact_bytes for row in self.rows]

    @property
    def ratio(self) -> list[float]:
        """For each row `cache_bytes` over `exact_bytes`."""
        return [held_after_prompt(row)[1] / row.exact_bytes for row in self.rows]

    @property
    def compress_s(self) -> list[float]:
        """For each row the seconds of compression."""
        return [row.compress_s for row in self.rows]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The function that replaces the model's own `generate`: check the options, call the original,
        and audit the caches."""
        assert self._original is not None
        bound = inspect.signature(self._original).bind_partial(*args, **kwargs).arguments
        check_options(self.model, {**bound, **bound.get("kwargs", {})})
        if not self._lock.held.acquire(blocking=False):
            raise UnsupportedGeneration(
                "another thread generates inside the same compress; allowed: one generation at a time "
                "(a copy of the model for each thread, or one batch)"
            )
        is_done = False
        try:
            self.finish()
            output = self._original(*args, **kwargs)
            is_done = True
        finally:
            self._lock.held.release()
            self.finish(audit=is_done)
        return output

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: give the pass to the model, and the cache to `generate`."""
        if "kvbench" in kwargs:  # a pass of kvbench's own engine, e.g. of `read`
            return args, kwargs
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            raise UnsupportedGeneration("inputs_embeds without input_ids; allowed: input_ids")
        batch, count = tokens.shape
        mask = kwargs.get("attention_mask")
        given = kwargs.get("past_key_values")
        self._check_call(kwargs)
        if isinstance(given, LiveCache):
            if self._lock.held.locked() and given is self._cache:
                # `generate` only adds ones to the mask; to read it would wait for the GPU.
                mask = None
            check_table(self.model, given.seen, count)
            self._continue_with(given)
            forget_lengths(self.model)
            state = given.begin_pass(batch, count)
            check_mask(mask, given, count)
            config = self.model.config.get_text_config()
            if is_hybrid(config):
                given.layers = state.past(config).layers
            state.begin()
            kwargs["kvbench"] = state
            return args, kwargs
        if given is not None:
            if type(given) is not DynamicCache or getattr(given, "offloading", False):
                raise UnsupportedGeneration(
                    f"past_key_values is a {type(given).__name__}; allowed: none, since compress "
                    "brings its own cache"
                )
            if given.get_seq_length():
                raise foreign_cache(given)
        if self._lock.held.locked() and self._cache is not None:
            # `generate` reads its tokens again, those of the answer among them.
            check_table(self.model, self._cache.seen, count - self._cache.seen)
        self.finish()
        self._start(tokens, mask)
        forget_lengths(self.model)
        kwargs |= {"past_key_values": self._cache, "use_cache": True, "kvbench": self._prefill}
        return args, kwargs

    def _check_call(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments of the model's forward that a compressed cache cannot serve."""
        names = ["output_attentions", "token_type_ids"]
        if hasattr(self.model, "create_masks_for_generate"):
            # Such a model (Molmo2) makes masks of these ids, by which images see later tokens.
            names.append("mm_token_type_ids")
        for name in names:
            refuse_unless_allowed(name, kwargs.get(name))
        if torch.is_grad_enabled():
            raise UnsupportedGeneration(
                "compress does not keep gradients; allowed: generate, or calls under torch.no_grad()"
            )
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self.model.config.get_text_config(), "use_cache", True)
        if not isinstance(kwargs.get("past_key_values"), LiveCache):
            refuse_unless_allowed("use_cache", use_cache)

    def _start(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Make the rows, the cache and the pass of a new batch of prompts.

        Raises:
            UnsupportedGeneration: `compress_after` is "context", or the method reads a prompt twice.
        """
        if self.compress_after == "context":
            raise UnsupportedGeneration(
                "compress_after is 'context' and generate does not know where the context of a prompt "
                "ends; allowed: session.read(context).ask(question)"
            )
        if self.method.second_pass is not None:
            raise UnsupportedGeneration(
                f"method {self.label!r} has the model repeat its prompt before it compresses, and "
                "generate reads a prompt once; allowed: session.read(context, tokenizer).ask(question)"
            )
        padding = left_padding(mask, *tokens.shape)
        rows = []
        for ids, start in zip(tokens.tolist(), padding, strict=True):
            row = Row(self.label, self.method, self.budget, self.seed, prompt_name(ids[start:]))
            row.begin_prompt(len(ids) - start)
            rows.append(row)
        self._cache = LiveCache(self.model, rows, [], 0)
        self._cache.open = True
        self._prefill = _BatchPrefill(self.model, rows, padding, tokens.shape[1])

    def _continue_with(self, cache: LiveCache) -> None:
        """Use a cache that `generate` was given: this generation's, or one of an earlier generation.

        Raises:
            UnsupportedGeneration: it is another model's.
        """
        if cache is self._cache:
            cache.open = True  # a copy made together with the model is closed
            return
        if cache.model is not self.model:
            raise UnsupportedGeneration(
                "past_key_values is a compressed cache of another model; allowed: one of this model"
            )
        self.finish()
        earlier = [costs for costs in self._batches if costs is not cache.costs]
        self._batches = [*earlier, cache.costs]
        self._cache = cache
        cache.open = True

    def after_forward(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Forward hook: count the tokens; after a prefill also note the cost of each row. A row's
        failure is raised."""
        cache: LiveCache | None = kwargs.get("past_key_values")
        if cache is None or cache is not self._cache:
            return
        tokens: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        count = tokens.shape[1]
        cache.seen += count
        prefill, self._prefill = self._prefill, None
        for place, row in enumerate(cache.rows):
            if prefill is not None:
                states = row_of(states_in(cache), place)
                prefill.prefills[place].end(count - prefill.padding[place], states)
            if row.failure is not None:
                raise row.failure
            if prefill is None:
                row.count_step(count)
            else:
                cache.costs.append(row.cost())
        if prefill is not None:
            self._batches.append(cache.costs)
        elif cache.kernel_batch is not None:
            cache.kernel_batch.move_on()
            cache.kernel_batch.taken += 1
        _check_logits(output, cache)

    def finish(self, *, audit: bool = True) -> None:
        """End the generation: audit every row's entries, and release the cache.

        Raises:
            BudgetExceeded: a row holds more than its budget and the tokens since.
            NonFiniteLogits: see `_check_logits`.
        """
        cache = self._cache
        prefill_failed = self._prefill is not None
        self._cache = None
        self._prefill = None
        if cache is None:
            return
        cache.write_back()
        cache.open = False
        if prefill_failed or not audit:
            return
        if cache.sound:
            flags = torch.stack([*cache.sound.values()]).tolist()
            for token, is_sound in zip(cache.sound, flags, strict=True):
                if not is_sound:
                    raise NonFiniteLogits(token)
        for row in cache.rows:
            row.audit()
        cache.costs[:] = [row.cost() for row in cache.rows[: len(cache.costs)]]


def _check_logits(output: Any, cache: LiveCache) -> None:
    """Refuse NaN and +inf in the logits of the next token, from which `generate` would go on. On a GPU,
    which would be waited for, they are noted for `Compression.finish`.

    Raises:
        NonFiniteLogits: naming the token.
    """
    logits = getattr(output, "logits", None)
    if logits is None:
        return
    is_sound, token = logits[:, -1].amax(-1).isfinite().all(), cache.rows[0].fed + 1
    if is_sound.is_cuda:
        cache.sound[token] = is_sound
    elif not is_sound:
        raise NonFiniteLogits(token)


def _no_batches(*_: Any, **__: Any) -> NoReturn:
    """The function that replaces `generate_batch`, which would not use the cache.

    Raises:
        UnsupportedGeneration: always.
    """
    raise UnsupportedGeneration(
        "generate_batch has a paged cache of its own; allowed: generate, with a batch of prompts"
    )


@contextmanager
def compressed_generation(compression: Compression) -> Iterator[Compression]:
    """See `kvbench.compress`.

    Raises:
        UnsupportedModel: see `kvbench_attention_on` and `compressible_layers`.
        UnsupportedGeneration: the model is under compression already.
    """
    model: Any = compression.model
    with ExitStack() as stack:
        stack.enter_context(kvbench_attention_on(model))
        if isinstance(getattr(model.generate, "__self__", None), Compression):
            raise UnsupportedGeneration(
                f"{type(model).__name__} is under compress already; allowed: one at a time"
            )
        compressible_layers(model)  # refuses a model without such layers
        before, after = compression.before_forward, compression.after_forward
        hook = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        stack.callback(hook.remove)
        stack.callback(model.register_forward_hook(after, with_kwargs=True).remove)
        compression._original = model.generate
        replaced = {"generate": compression.generate, "generate_batch": _no_batches}
        # Callbacks run in reverse order: the replacements are removed, then what was there is restored.
        before_replacing = {name: x for name, x in vars(model).items() if name in replaced}
        stack.callback(model.__dict__.update, before_replacing)
        for name in replaced:
            stack.callback(model.__dict__.pop, name)
        model.__dict__.update(replaced)
        is_done = False
        try:
            yield compression
            is_done = True
        finally:
            compression.finish(audit=is_done)


# --- what a compressed cache cannot serve ---------------------------------------------------------


def left_padding(mask: Tensor | None, batch: int, count: int) -> list[int]:
    """Count the leading padding tokens of each row.

    Args:
        mask: [batch, count], the attention mask of the prompt; None for no padding.
        batch: the number of rows.
        count: the number of tokens of each row, padding included.

    Raises:
        UnsupportedGeneration: padding elsewhere, or a row of padding only.
    """
    if mask is None:
        return [0] * batch
    if tuple(mask.shape) != (batch, count):
        raise UnsupportedGeneration(
            f"attention_mask has shape {tuple(mask.shape)}; allowed: {(batch, count)}, the prompt's"
        )
    padding = []
    for row, shown in enumerate(mask.to("cpu", torch.bool)):
        start = count - int(shown.sum())
        if start == count or not bool(shown[start:].all()):
            raise UnsupportedGeneration(
                f"attention_mask of row {row} hides tokens after the first shown one, or all; allowed: "
                "padding on the left (tokenizer.padding_side = 'left')"
            )
        padding.append(start)
    return padding


def check_mask(mask: Tensor | None, cache: LiveCache, count: int) -> None:
    """Check the attention mask of a pass that feeds `count` tokens to every row of a cache.

    Args:
        mask: [batch, tokens], of all tokens or of the new ones alone; None for no mask.

    Raises:
        UnsupportedGeneration: it hides another token than the padding before the prompt, which the cache
            does not hold. (`generate` makes a mask that hides every token with the pad token's id.)
    """
    if mask is None:
        return
    if mask.shape[1] > count:
        padding = left_padding(mask, *mask.shape)
        held = [cache.seen - row.tokens for row in cache.rows]
        if mask.shape[1] == cache.seen + count and padding != held:
            row = next(
                i for i, (now, then) in enumerate(zip(padding, held, strict=True)) if now != then
            )
            raise UnsupportedGeneration(
                f"attention_mask of row {row} hides {padding[row]} tokens, and it hid {held[row]} of "
                "the first turn; allowed: the padding of the first turn, and ones"
            )
    elif not bool(mask.all()):
        raise UnsupportedGeneration("attention_mask hides new tokens; allowed: left padding")


def foreign_cache(cache: Any) -> UnsupportedGeneration:
    """Make the error for a cache that kvbench did not fill."""
    return UnsupportedGeneration(
        f"past_key_values is a {type(cache).__name__} that was not filled under compress, without the "
        "queries that methods choose by; allowed: none, or a cache that compress made of this model "
        "(the past_key_values of an earlier output, context.cache())"
    )


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "assistant_model": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
    "guidance_scale": (None, 1),
    "use_cache": (None, True),
    "output_attentions": (None, False),
    "token_type_ids": (None,),
}
"""Options of `generate`, and the values of each that are possible. A compressed cache cannot remove
tokens (assisted decoding does), is made in one forward pass over the whole prompt, computes no attention
matrix, and is causal: no token sees a later one."""


def refuse_unless_allowed(name: str, value: Any) -> None:
    """Refuse the value of an option that is not in `_ALLOWED`."""
    allowed = _ALLOWED.get(name, (None,))
    if value not in allowed:
        shown = value if isinstance(value, bool | int | float | str) else type(value).__name__
        raise UnsupportedGeneration(
            f"{name} is {shown!r}, which a compressed cache cannot serve; allowed: "
            f"{' or '.join(map(repr, allowed))}"
        )


def check_table(model: PreTrainedModel, read: int, fed: int) -> None:
    """Refuse tokens beyond the length at which LongRoPE's factors change (`crossing`)."""
    failure = crossing(model.config, read, fed)
    if failure is not None:
        raise UnsupportedGeneration(str(failure))


def check_options(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Refuse, before anything runs, options of `generate` that a compressed cache cannot serve."""
    past = given.get("past_key_values")
    if past is not None and not isinstance(past, LiveCache):
        raise foreign_cache(past)
    ids = given.get("inputs") if given.get("inputs") is not None else given.get("input_ids")
    if past is not None and ids is not None:
        mask = given.get("attention_mask")
        whole = ids.shape[1] if mask is None else max(ids.shape[1], mask.shape[1])
        if whole <= past.seen:
            raise UnsupportedGeneration(
                f"input_ids have {whole} tokens and past_key_values holds {past.seen}; allowed: the "
                "whole conversation, new tokens included"
            )
        # `generate` would read the conversation again without the cache.
        check_table(model, past.seen, whole - past.seen)
    sources = (given.get("generation_config"), model.generation_config)
    for name in _ALLOWED:
        values = [given.get(name), *(getattr(source, name, None) for source in sources)]
        refuse_unless_allowed(name, next((value for value in values if value is not None), None))
