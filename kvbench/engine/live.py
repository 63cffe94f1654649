"""transformers' own `generate` with compressed caches, and contexts that are asked many questions: what
`kvbench.compress` gives.

A forward hook replaces the cache that `generate` made by a `LiveCache`, which does generate's
bookkeeping (lengths, beams) and holds no keys or values itself: the attention function gives those to
the forks, one per batch row, as in the benchmark.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvbench.engine.architecture import compressible_layers, kvbench_attention_on, rotary_of
from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import GROWTH
from kvbench.engine.decoding import DecodeState
from kvbench.engine.fork import Cost, Fork, ForkBatch, copies_at_once, prompt_name
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.loading import end_token_ids, model_end_ids
from kvbench.engine.prefill import PrefillState, input_device, prefill
from kvbench.engine.rows import DecodingRow, decode_rows, feed_questions
from kvbench.engine.states import PassingCache, is_hybrid, row_of, state_bytes, states_in
from kvbench.engine.stopping import Stopping
from kvbench.errors.options import Count, fits
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.tasks.base import PromptEncoder, check_length, tokenizing

Text = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or what a tokenizer returns for one text."""


class UnsupportedGeneration(ValueError):
    """A use of `generate` that a compressed cache cannot serve: one line with what is allowed."""


class LiveCache(Cache):
    """The forks of a batch, as generate's cache; operations it cannot serve are refused.

    Args:
        model: whose keys and values they hold.
        forks: one per row.
        rows: what each costs, its tokens without padding; empty before the prefill, changed in place.
        seen: tokens fed so far to each row, padding included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forks: Sequence[Fork],
        rows: Sequence[Cost],
        seen: int,
    ) -> None:
        config = model.config.get_text_config()
        super().__init__(layers=PassingCache(config).layers if is_hybrid(config) else [])
        self.model = model
        self.forks, self.rows = list(forks), list(rows)
        self.seen = seen
        self.open = True  # until the generation that it belongs to is over
        self.steps: DecodeState | None = None  # of single tokens, one after the other

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveCache:
        """An independent copy; if the model is copied too, it belongs to that copy."""
        self.settle()
        forks = [fork.clone() for fork in self.forks]
        model = memo.get(id(self.model), self.model)
        return LiveCache(model, forks, self.rows, self.seen)

    def __len__(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def is_compileable(self) -> bool:
        """Rows differ in length, so there is nothing to compile."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: the attention function stores them.

        Raises:
            UnsupportedGeneration: the generation is over, so that nothing would store them.
        """
        if not self.open:
            raise UnsupportedGeneration(
                "past_key_values is a compressed cache whose generation is over; allowed: inside "
                "compress, where it can be given back to generate with the whole conversation as "
                "input_ids"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens fed so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the mask that transformers believes it needs."""
        count = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + count, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row ``beam_idx[i]``; a row from which several do is copied."""
        self.settle()
        indices = beam_idx.tolist()
        self.forks = [
            self.forks[index].clone() if index in indices[:place] else self.forks[index]
            for place, index in enumerate(indices)
        ]

    def crop(self, tokens: int) -> None:
        """Refused: what a method dropped does not come back."""
        raise UnsupportedGeneration("a compressed cache cannot be cropped; call generate again")

    def begin_pass(self, batch: int, count: int, mask: Tensor | None) -> ForkBatch:
        """Attention state of a pass that feeds so many tokens to every row. Single tokens go on with
        that of the token before, in room for `GROWTH` tokens, until something else happens.

        Args:
            mask: of all tokens; None where it hides none of the new ones.

        Raises:
            UnsupportedGeneration: another number of rows; hidden tokens.
        """
        if batch != len(self.forks):
            raise UnsupportedGeneration(
                f"the batch has {batch} rows and the cache {len(self.forks)}; allowed: as many"
            )
        if mask is not None and not bool(mask[:, -count:].all()):
            raise UnsupportedGeneration("attention_mask hides new tokens; allowed: left padding")
        taken = self.forks[0].appended % GROWTH
        if count == 1 and taken and self.steps is not None:
            return self.steps
        self.settle()
        if count > 1:
            first = torch.tensor([fork.tokens for fork in self.forks])
            return ForkBatch(self.forks, first[:, None] + torch.arange(count))
        room, device = [GROWTH - taken] * batch, input_device(self.model)
        self.steps = DecodeState(self.forks, room, device)
        return self.steps

    def settle(self) -> None:
        """Something else than single tokens follows: tell the forks what they hold."""
        if self.steps is not None:
            self.steps.settle()
        self.steps = None


class Context:
    """One prompt, prefilled once and compressed before any question is known.

    `ask` answers without changing the cache, so that answers do not depend on earlier questions; with
    ``keep=True`` the question and its answer are added to the cache. Draws depend on the seed, the
    prompt and the layer, so that a document is always compressed to the same cache.

    Attributes:
        entries: per layer and KV head after compression, mean and maximum.
        cache_bytes, exact_bytes: after compression, and of the exact cache.
        prefill_s, compress_s: seconds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        budget: Budget,
        prompt: Text,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        label: str = "method",
        seed: int = 0,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._ids = token_ids(prompt, tokenizer, "the context")
        fork = Fork(label, method, budget, seed, prompt_name(self._ids), room=0)
        with kvbench_attention_on(model), torch.inference_mode():
            encoder = None if tokenizer is None else PromptEncoder(tokenizer)
            start = prefill(model, self._ids, [fork], encoder=encoder)
        if fork.failure is not None:
            raise fork.failure
        self._fork, cost = fork, fork.cost()
        self._graphs = StepGraphs()  # one for all questions: a capture that fails is tried once
        self.entries, self.cache_bytes = _held(cost)
        self.exact_bytes, self.compress_s = cost.exact_bytes, cost.compress_s
        self.prefill_s = start.prefill_s

    def __repr__(self) -> str:
        return (
            f"<kvbench context: {self._fork.label}, {self.tokens} tokens, ratio {self.ratio:.3g}>"
        )

    @property
    def ratio(self) -> float:
        """`cache_bytes` over `exact_bytes`."""
        return self.cache_bytes / self.exact_bytes

    @property
    def tokens(self) -> int:
        """Tokens in the cache: the prompt's, and those of turns that were kept."""
        return self._fork.tokens

    @property
    def token_ids(self) -> list[int]:
        """Tokens of prompt, questions and answers; an answer's last one is fed with the next turn."""
        return list(self._ids)

    def ask(
        self,
        question: Text,
        *,
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        keep: bool = False,
    ) -> Any:
        """The greedy answer to one question: text where there is a tokenizer, else token ids.

        Args:
            question: what follows the context, as text (tokenised without special tokens) or ids.
            stop: strings that end an answer, and are cut from it; need a tokenizer.
            keep: add the question and its answer to the cache.

        Raises:
            KVError: an empty question, text without a tokenizer, a wrong `max_new_tokens`.
            BudgetExceeded, and whatever the method raises; the cache is then unchanged.
        """
        ids = token_ids(question, self.tokenizer, "the question", special=False)
        ((answer, row),) = self._answers([ids], max_new_tokens, stop)
        if keep:
            self._ids += [*ids, *row.chosen]
            self._fork = row.fork
        return answer

    def ask_all(
        self, questions: Sequence[Text], *, max_new_tokens: int = 64, stop: Sequence[str] = ()
    ) -> list[Any]:
        """The answers to several questions, each as `ask` gives it, decoded together; as many at once
        as half of the free memory has room for copies of the cache."""
        asked = [token_ids(one, self.tokenizer, "the question", special=False) for one in questions]
        at_once = copies_at_once([self._fork], len(asked), input_device(self.model))
        return [
            answer
            for first in range(0, len(asked), at_once)
            for answer, _ in self._answers(asked[first : first + at_once], max_new_tokens, stop)
        ]

    def cache(self) -> LiveCache:
        """A cache for ``model.generate(input_ids, past_key_values=...)`` inside `compress`, to continue
        from here; ``input_ids`` must begin with all of `token_ids`, as transformers requires."""
        fork = self._fork.clone()
        return LiveCache(self.model, [fork], [fork.cost()], self.tokens)

    def _answers(
        self, asked: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str]
    ) -> list[tuple[Any, DecodingRow]]:
        model, tokenizer = self.model, self.tokenizer
        if not fits(Count, max_new_tokens):
            raise KVError(f"max_new_tokens is {max_new_tokens!r}; allowed: an integer >= 1")
        if stop and tokenizer is None:
            raise KVError("stop is given and there is no tokenizer; allowed: read(..., tokenizer)")
        ends, decode = model_end_ids(model), None
        if tokenizer is not None:
            ends, decode = end_token_ids(model, tokenizer), decoder(tokenizer)
        stopping = Stopping(max_new_tokens, ends, tuple(stop), decode)
        unread = self._ids[self.tokens :]
        with kvbench_attention_on(model), torch.inference_mode():
            rows = [DecodingRow(self._fork.clone(), stopping) for _ in asked]
            feed_questions(model, rows, [[*unread, *ids] for ids in asked])
            decode_rows(model, [row for row in rows if row.chosen], self._graphs)
        found: list[tuple[Any, DecodingRow]] = []
        for row in rows:
            answer = row.finish()
            if answer.failure is not None:
                raise answer.failure
            said = answer.tokens if decode is None else stopping.cut(decode(answer.tokens))
            found.append((said, row))
        return found


def _held(cost: Cost) -> tuple[dict[str, float], int]:
    """Entries and bytes after compression, of a prompt that was read without a failure."""
    assert cost.entries is not None
    assert cost.cache_bytes is not None
    return cost.entries, cost.cache_bytes


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Token ids to text, without special tokens."""
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def token_ids(
    given: Text, tokenizer: PreTrainedTokenizerBase | None, what: str, *, special: bool = True
) -> list[int]:
    """The token ids of a text, of ids, or of a tokenizer's output.

    Raises:
        KVError: no tokens, several texts, or text where there is no tokenizer.
    """
    if isinstance(given, str):
        if tokenizer is None:
            raise KVError(f"{what} is text and there is no tokenizer; allowed: ids, or a tokenizer")
        check_length(given)
        with tokenizing(tokenizer):
            given = tokenizer(given, **({} if special else {"add_special_tokens": False}))
    ids: Any = given["input_ids"] if isinstance(given, Mapping) else given
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if ids and isinstance(ids[0], list):
        if len(ids) > 1:
            raise KVError(f"{what} has {len(ids)} texts; allowed: one")
        ids = ids[0]
    if not ids or not all(isinstance(token, int) for token in ids):
        raise KVError(f"{what} has no token ids; allowed: text, or at least one token id")
    return ids


class _BatchPrefill:
    """Attention state of a batch's prefill: every row is read separately, without its padding.

    Args:
        forks: one per row.
        padding: leading tokens of each row that are padding.
    """

    def __init__(
        self, model: PreTrainedModel, forks: Sequence[Fork], padding: Sequence[int]
    ) -> None:
        layers, rotary = compressible_layers(model), rotary_of(model)
        self.padding = padding
        self.rows = [PrefillState([fork], layers, rotary) for fork in forks]

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention of each row's own tokens; padding attends to nothing."""
        out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
        for i, (row, start) in enumerate(zip(self.rows, self.padding, strict=True)):
            out[i : i + 1, :, start:] = row.attend(call.of_row(i, start))
            failure = row.forks[0].failure
            if failure is not None:
                raise failure
        return out


@dataclass(repr=False)
class Compression:
    """One method around one model; yielded by `kvbench.compress`.

    Attributes:
        compress_after: see `kvbench.compress`.
    """

    model: PreTrainedModel
    method: Method
    budget: Budget
    label: str
    seed: int = 0
    compress_after: str | None = None
    _calls: list[list[Cost]] = field(default_factory=list)
    _cache: LiveCache | None = None
    _prefill: _BatchPrefill | None = None
    _original: Callable[..., Any] | None = None
    _thread: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        last = f", ratio of the last {self.ratio[-1]:.3g}" if self.rows else ""
        return f"<kvbench session: {self.label}, {self.budget}; {len(self.rows)} rows{last}>"

    def __post_init__(self) -> None:
        if self.compress_after not in (None, "prompt", "context"):
            raise KVError(
                f"compress_after is {self.compress_after!r}; allowed: 'prompt' or 'context', which "
                "session.read(context).ask(question) compresses before it knows the question"
            )

    def read(self, prompt: Text, tokenizer: PreTrainedTokenizerBase | None = None) -> Context:
        """Prefill a prompt once and compress it, to be asked many things: see `Context.ask`.

        Raises:
            KVError: an empty prompt, text without a tokenizer, or a `compress_after` that says
                otherwise.
        """
        if self.compress_after == "prompt":
            raise KVError(
                "compress_after is 'prompt' and a context is compressed before its questions; allowed: "
                "'context', or generate with each question in its prompt"
            )
        return Context(
            self.model,
            self.method,
            self.budget,
            prompt,
            tokenizer,
            label=self.label,
            seed=self.seed,
        )

    @property
    def rows(self) -> list[Cost]:
        """What the cache of every batch row of every prompt so far costs, in order (`generate` repeats a
        prompt for each beam and each returned sequence)."""
        return [row for rows in self._calls for row in rows]

    @property
    def entries(self) -> list[float]:
        """Entries per layer and KV head after compression, mean over both, of each row."""
        return [_held(row)[0]["mean"] for row in self.rows]

    @property
    def cache_bytes(self) -> list[int]:
        """Bytes held after compression, of each row."""
        return [_held(row)[1] for row in self.rows]

    @property
    def exact_bytes(self) -> list[int]:
        """Bytes the exact cache would hold at the same point, of each row."""
        return [row.exact_bytes for row in self.rows]

    @property
    def ratio(self) -> list[float]:
        """`cache_bytes` over `exact_bytes`, of each row."""
        return [_held(row)[1] / row.exact_bytes for row in self.rows]

    @property
    def compress_s(self) -> list[float]:
        """Seconds of compression, of each row."""
        return [row.compress_s for row in self.rows]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own: its options are checked, and it ends with `finish`."""
        assert self._original is not None
        bound = inspect.signature(self._original).bind_partial(*args, **kwargs).arguments
        _check_options(self.model, {**bound, **bound.get("kwargs", {})})
        if self._thread.setdefault("id", threading.get_ident()) != threading.get_ident():
            raise UnsupportedGeneration(
                "another thread generates inside the same compress; allowed: one generation at a time "
                "(a copy of the model for each thread, or one batch)"
            )
        try:
            self.finish()
            output = self._original(*args, **kwargs)
        except BaseException:
            self.finish(audit=False)
            raise
        finally:
            self._thread.clear()
        self.finish()
        return output

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: pass the attention state to the model, and the cache to `generate`."""
        if "kvbench" in kwargs:  # the benchmark's own engine at work on the same model
            return args, kwargs
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            raise UnsupportedGeneration("inputs_embeds without input_ids; allowed: input_ids")
        batch, count = tokens.shape
        mask, given = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        self._check_call(kwargs)
        if isinstance(given, LiveCache):
            if self._thread and given is self._cache:
                mask = None  # inside generate it has grown by ones, and to look would be to wait
            self._continue_with(given)
            state = given.begin_pass(batch, count, mask)
            config = self.model.config.get_text_config()
            if is_hybrid(config):
                given.layers = state.past(config).layers
            kwargs["kvbench"] = state
            return args, kwargs
        if given is not None:
            if type(given) is not DynamicCache or getattr(given, "offloading", False):
                raise UnsupportedGeneration(
                    f"past_key_values is a {type(given).__name__}; allowed: none, since compress "
                    "brings its own cache"
                )
            if given.get_seq_length():
                raise _not_ours(given)
        self.finish()
        self._start(tokens, mask)
        kwargs |= {"past_key_values": self._cache, "use_cache": True, "kvbench": self._prefill}
        return args, kwargs

    def _check_call(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments of the model's forward that a compressed cache cannot serve."""
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self.model.config.get_text_config(), "use_cache", True)
        if kwargs.get("output_attentions"):
            raise _refused("output_attentions", True)
        if kwargs.get("token_type_ids") is not None:
            raise _refused("token_type_ids", kwargs["token_type_ids"])
        if torch.is_grad_enabled():
            raise UnsupportedGeneration(
                "compress does not keep gradients; allowed: generate, or calls under torch.no_grad()"
            )
        if not use_cache and not isinstance(kwargs.get("past_key_values"), LiveCache):
            raise _refused("use_cache", False)

    def _start(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Forks for a new batch of prompts.

        Raises:
            UnsupportedGeneration: `compress_after` is "context", or the method reads a prompt twice.
        """
        if self.compress_after == "context":
            raise UnsupportedGeneration(
                "compress_after is 'context' and generate does not know where the context of a prompt "
                "ends; allowed: session.read(context).ask(question)"
            )
        if self.method.rescoring is not None:
            raise UnsupportedGeneration(
                f"method {self.label!r} has the model repeat its prompt before it compresses, and "
                "generate reads a prompt once; allowed: session.read(context, tokenizer).ask(question)"
            )
        padding, forks = _left_padding(mask, *tokens.shape), []
        ranks = getattr(self.model, "tp_size", None) or 1
        for row, start in zip(tokens.tolist(), padding, strict=True):
            name = prompt_name(row[start:])
            forks.append(Fork(self.label, self.method, self.budget, self.seed, name, room=0))
            forks[-1].begin_prompt(len(row) - start, ranks)
        self._cache = LiveCache(self.model, forks, [], 0)
        self._prefill = _BatchPrefill(self.model, forks, padding)

    def _continue_with(self, cache: LiveCache) -> None:
        """Continue with a cache: this generation's, or one from an earlier generation.

        Raises:
            UnsupportedGeneration: it is another model's.
        """
        if cache is self._cache:
            return
        if cache.model is not self.model:
            raise UnsupportedGeneration(
                "past_key_values is a compressed cache of another model; allowed: one of this model"
            )
        self.finish()
        self._calls = [rows for rows in self._calls if rows is not cache.rows] + [cache.rows]
        self._cache, cache.open = cache, True

    def after_forward(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Forward hook: count tokens, fill in the rows, raise a fork's failure."""
        cache: LiveCache | None = kwargs.get("past_key_values")
        if cache is None or cache is not self._cache:
            return
        tokens: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        count = tokens.shape[1]
        cache.seen += count
        starting, self._prefill = self._prefill, None
        if starting is None:
            for fork in cache.forks:
                if fork.failure is not None:
                    raise fork.failure
                fork.fed(count)
            if cache.steps is not None:
                cache.steps.move_on()
                cache.steps.taken += 1
            return
        for number, fork in enumerate(cache.forks):
            fork.states = row_of(states_in(cache), number)
        for fork, start, state in zip(cache.forks, starting.padding, starting.rows, strict=True):
            state.settle()
            if fork.failure is not None:
                raise fork.failure
            state.exact.states = state_bytes(fork.states)
            fork.end_prompt(count - start, state.exact)
            cache.rows.append(fork.cost())
        self._calls.append(cache.rows)

    def finish(self, *, audit: bool = True) -> None:
        """End the generation: audit every row's entries, and release the cache.

        Raises:
            BudgetExceeded: a row holds more than its budget and the tokens since.
        """
        cache, self._cache = self._cache, None
        failed, self._prefill = self._prefill is not None, None
        if cache is None:
            return
        cache.settle()
        cache.open = False
        if failed or not audit:
            return
        for fork in cache.forks:
            fork.audit()
        cache.rows[:] = [fork.cost() for fork in cache.forks[: len(cache.rows)]]


def _left_padding(mask: Tensor | None, batch: int, count: int) -> list[int]:
    """Leading padding tokens of each row.

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
    for i, row in enumerate(mask.to("cpu", torch.bool)):
        start = count - int(row.sum())
        if start == count or not bool(row[start:].all()):
            raise UnsupportedGeneration(
                f"attention_mask of row {i} hides tokens after the first shown one, or all; allowed: "
                "padding on the left (tokenizer.padding_side = 'left')"
            )
        padding.append(start)
    return padding


def _not_ours(cache: Any) -> UnsupportedGeneration:
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
"""Values that a compressed cache can serve, of options of `generate`: it takes no tokens back, is of one
prompt that is read at once, computes no attention matrix, and knows no tokens that see later ones."""


def _refused(name: str, value: Any) -> UnsupportedGeneration:
    shown = value if isinstance(value, bool | int | float | str) else type(value).__name__
    allowed = " or ".join(map(repr, _ALLOWED[name]))
    return UnsupportedGeneration(
        f"{name} is {shown!r}, which a compressed cache cannot serve; allowed: {allowed}"
    )


def _check_options(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Refuse, before anything runs, options of `generate` that a compressed cache cannot serve."""
    past = given.get("past_key_values")
    if past is not None and not isinstance(past, LiveCache):
        raise _not_ours(past)
    ids = given.get("inputs") if given.get("inputs") is not None else given.get("input_ids")
    if past is not None and ids is not None:
        mask = given.get("attention_mask")
        whole = ids.shape[1] if mask is None else max(ids.shape[1], mask.shape[1])
        if whole <= past.seen:
            raise UnsupportedGeneration(
                f"input_ids have {whole} tokens and past_key_values holds {past.seen}; allowed: the "
                "whole conversation, new tokens included"
            )
    sources = (given.get("generation_config"), model.generation_config)
    for name, allowed in _ALLOWED.items():
        values = [given.get(name), *(getattr(source, name, None) for source in sources)]
        value = next((value for value in values if value is not None), None)
        if value not in allowed:
            raise _refused(name, value)


def _no_batches(*_: Any, **__: Any) -> NoReturn:
    """Replaces `generate_batch`."""
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
    model: Any = getattr(compression.model, "_orig_mod", compression.model)  # compiled
    compression.model = model
    with ExitStack() as stack:
        stack.enter_context(kvbench_attention_on(model))
        if isinstance(getattr(model.generate, "__self__", None), Compression):
            raise UnsupportedGeneration(
                f"{type(model).__name__} is under compress already; allowed: one at a time"
            )
        compressible_layers(model)  # refuses a model without any
        before, after = compression.before_forward, compression.after_forward
        hook = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        stack.callback(hook.remove)
        stack.callback(model.register_forward_hook(after, with_kwargs=True).remove)
        compression._original = model.generate
        replaced = {"generate": compression.generate, "generate_batch": _no_batches}
        stack.callback(
            model.__dict__.update, {k: v for k, v in vars(model).items() if k in replaced}
        )
        for name in replaced:
            stack.callback(model.__dict__.pop, name)
        model.__dict__.update(replaced)
        try:
            yield compression
        except BaseException:
            compression.finish(audit=False)
            raise
        compression.finish()
