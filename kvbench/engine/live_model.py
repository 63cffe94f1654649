"""A transformers model inside `kvbench.compress`: its attention, its hooks, options it refuses."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from typing import Any, NoReturn

from transformers import PreTrainedModel

from kvbench.engine.live import Compression
from kvbench.engine.live_cache import (
    NO_ATTENTIONS,
    NO_CACHE,
    NOT_OURS,
    LiveCache,
    UnsupportedGeneration,
)
from kvbench.engine.prefill import compressible_layers
from kvbench.engine.switch import kvbench_attention_on

_NO_THREADS = (
    "another thread generates inside the same compress; allowed: one generation at a time (a copy of "
    "the model for each thread, or one batch)"
)


def _refuse(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Refuse, before anything runs, options of `generate` that a compressed cache cannot serve."""

    def option(name: str) -> Any:
        sources = (given.get("generation_config"), model.generation_config)
        values = [given.get(name), *(getattr(source, name, None) for source in sources)]
        return next((value for value in values if value is not None), None)

    past = given.get("past_key_values")
    if past is not None and not isinstance(past, LiveCache):
        raise UnsupportedGeneration(NOT_OURS.format(kind=type(past).__name__))
    ids = given.get("inputs") if given.get("inputs") is not None else given.get("input_ids")
    if past is not None and ids is not None:
        past.check_continued(ids, given.get("attention_mask"))
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if option(name) is not None:
            raise UnsupportedGeneration(
                f"{name} asks for assisted decoding, which takes tokens back out of the cache; "
                "allowed: greedy, sampling, beam search"
            )
    if option("cache_implementation") not in (None, "dynamic"):
        raise UnsupportedGeneration(
            f"cache_implementation is {option('cache_implementation')!r}; allowed: none, since "
            "compress brings its own cache"
        )
    if option("prefill_chunk_size") is not None:
        raise UnsupportedGeneration(
            "prefill_chunk_size is set; methods see the whole prompt at once; allowed: none"
        )
    if option("guidance_scale") not in (None, 1):
        raise UnsupportedGeneration(
            f"guidance_scale is {option('guidance_scale')}, which generates from two prompts with two "
            "caches at once; allowed: none"
        )
    if option("use_cache") is False:
        raise UnsupportedGeneration(NO_CACHE)
    if option("output_attentions"):
        raise UnsupportedGeneration(NO_ATTENTIONS)


class _CheckedGenerate:
    """`model.generate`, with its options checked and every generation ended by `Compression.finish`.

    An object, not a closure, so that a deep copy of the model has its own.
    """

    def __init__(self, compression: Compression, original: Callable[..., Any]) -> None:
        self.compression = compression
        self.original = original
        self.thread: dict[str, int] = {}  # the thread that generates now
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `transformers.GenerationMixin.generate`."""
        bound = inspect.signature(self.original).bind_partial(*args, **kwargs).arguments
        _refuse(self.compression.model, {**bound, **bound.get("kwargs", {})})
        if self.thread.setdefault("id", threading.get_ident()) != threading.get_ident():
            raise UnsupportedGeneration(_NO_THREADS)
        try:
            self.compression.finish()
            output = self.original(*args, **kwargs)
        except BaseException:
            self.compression.finish(audit=False)
            raise
        finally:
            self.thread.clear()
        self.compression.finish()
        return output


def _no_batches(*_: Any, **__: Any) -> NoReturn:
    """Replaces `generate_batch`."""
    raise UnsupportedGeneration(
        "generate_batch has a paged cache of its own; allowed: generate, with a batch of prompts"
    )


@contextmanager
def _attribute(model: PreTrainedModel, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of this object within the context; restored afterwards."""
    own = {name: model.__dict__[name]} if name in model.__dict__ else {}
    model.__dict__[name] = value
    try:
        yield
    finally:
        del model.__dict__[name]
        model.__dict__.update(own)


@contextmanager
def compressed_generation(compression: Compression) -> Iterator[Compression]:
    """See `kvbench.compress`.

    Raises:
        UnsupportedModel: see `kvbench_attention_on` and `compressible_layers`.
        UnsupportedGeneration: the model is under compression already.
    """
    compression.model = model = getattr(
        compression.model, "_orig_mod", compression.model
    )  # compiled
    with ExitStack() as stack:
        stack.enter_context(kvbench_attention_on(model))
        if isinstance(model.__dict__.get("generate"), _CheckedGenerate):
            raise UnsupportedGeneration(
                f"{type(model).__name__} is under compress already; allowed: one at a time"
            )
        compression._compressible = compressible_layers(model)
        before = model.register_forward_pre_hook(
            compression.before_forward, with_kwargs=True, prepend=True
        )
        stack.callback(before.remove)
        after = model.register_forward_hook(compression.after_forward, with_kwargs=True)
        stack.callback(after.remove)
        generate: Any = model.generate
        guarded = _CheckedGenerate(compression, generate)
        stack.enter_context(_attribute(model, "generate", guarded))
        stack.enter_context(_attribute(model, "generate_batch", _no_batches))
        try:
            yield compression
        except BaseException:
            compression.finish(audit=False)
            raise
        compression.finish()
