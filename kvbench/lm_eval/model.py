"""A model of lm-evaluation-harness whose cache is compressed by one of kvbench's methods."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from inspect import signature
from statistics import fmean
from typing import Any, Literal

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from kvbench.api import load_model
from kvbench.engine.answer import Stopping
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.ask import Question, converse
from kvbench.engine.context import read_prompt
from kvbench.engine.model import end_token_ids
from kvbench.engine.prefill import Reading
from kvbench.engine.processors import acting_options
from kvbench.errors import UserError, nearest
from kvbench.errors.options import checked
from kvbench.kv import Budget
from kvbench.lm_eval.scoring import Requests, Scoring, answer_requests, cost_fields
from kvbench.methods import build_method

log = logging.getLogger(__name__)

LABEL = "method"
Protocol = Literal["all_but_last", "prompt"]
_BEFORE = {"protocol": " (now compress_after; minus_last is all_but_last)"}
"""Arguments of earlier versions, and their names now."""


@register_model("kvbench")
class KVBenchLM(Requests):
    """A model that computes likelihoods and generates from a compressed cache.

    For a likelihood request, the context without its last token is compressed. The last token and the
    continuation are then fed to the compressed cache, so that the first token of the continuation,
    which in most tasks is the only one, is scored on the compressed cache too. Requests of one context
    share its prefill. lm-evaluation-harness computes its metrics from these likelihoods.

    Args:
        pretrained: a name of ``kvbench list models``, a folder or an id of the Hub.
        method_args: options of the method, JSON or a mapping. Options written ``snapkv.kernel_size=7``
            override them.
        rate, sink, window, size, total_rate: the budget; see `kvbench.kv.Budget`. A budget smaller than
            the default sink and window is written ``total_rate=0.04,sink=0,window=0``.
        scoring: ``sum``; or ``mean``, the log-probability per token, as in H2O's released evaluation.
        compress_after: how prompts of generations are compressed. ``all_but_last`` compresses all but
            the last token, as for likelihoods, so that every token comes from the compressed cache;
            ``prompt`` compresses the whole prompt and takes the first token from the exact prefill, as
            in the papers, and has no likelihoods.
        batch_size: how many prompts generate together. At least 32 rows are scored together.
        generation_config: whether the logits processors of the model's generation config act; those of a
            task's generation kwargs do in any case.
        add_bos_token: see HFLM; None for the tokenizer's own setting.
        max_length: the most tokens of context and continuation; None for the model's positions.

    Attributes:
        records: for every likelihood request so far, in order, a mapping of what lm-evaluation-harness
            does not store: tokens, entries, bytes, and whether the context was compressed.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        method: str = "exact",
        method_args: str | Mapping[str, Any] | None = None,
        *,
        rate: float = Budget.rate,
        sink: int = Budget.sink,
        window: int = Budget.window,
        size: int | None = None,
        total_rate: float | None = None,
        seed: int = 0,
        scoring: Scoring = "sum",
        compress_after: Protocol = "all_but_last",
        generation_config: bool = True,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        trust_remote_code: bool = False,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        metadata: object = None,
        **dotted: Any,
    ) -> None:
        # The harness passes these two to every model.
        del max_batch_size, metadata
        if pretrained is None:
            raise UserError(
                "model_args has no pretrained; allowed: pretrained=<model>,method=<name>"
            )
        for name, value, hint in (
            ("scoring", scoring, Scoring),
            ("compress_after", compress_after, Protocol),
            ("generation_config", generation_config, bool),
            ("seed", seed, int),
        ):
            checked(f"model_args {name}", value, hint)
        self.options = method_options(method, method_args, dotted)
        self.scoring = scoring
        self.compress_after = compress_after
        self.generation_config = generation_config
        self.method_name = method
        self.seed = seed
        self.method = build_method(method, **self.options)
        self.method.quantization()
        self.budget = Budget(rate=rate, sink=sink, window=window, size=size, total_rate=total_rate)
        self.methods = {LABEL: (self.method, self.budget)}
        if device and device.startswith("cuda") and not torch.cuda.is_available():
            log.warning("device is %s, which the command line has by default; no GPU: cpu", device)
            device = "cpu"
        given = {
            "revision": revision,
            "tokenizer": tokenizer,
            "trust_remote_code": trust_remote_code,
        }
        model, model_tokenizer = load_model(
            pretrained,
            device=device or "auto",
            dtype=dtype,
            **{name: value for name, value in given.items() if value is not None},
        )
        super().__init__(
            model,
            model_tokenizer,
            max_length=max_length,
            add_bos_token=add_bos_token,
            batch_size=batch_size if isinstance(batch_size, int) else 8,
            think_end_token=think_end_token,
            enable_thinking=enable_thinking,
        )
        self.records: list[dict[str, Any]] = []

    def set_cache_hook(self, cache_hook: Any) -> None:
        raise UserError(
            "--use_cache keeps answers by request alone, so that two methods would share them; allowed: "
            "without it (--cache_requests is harmless)"
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        if self.compress_after == "prompt":
            raise UserError(
                "compress_after is 'prompt', whose first token is the exact cache's, and a likelihood "
                "is asked of the compressed one; allowed: all_but_last"
            )
        with kvbench_attention_on(self.model):
            scored = answer_requests(
                self.model,
                [(context, continuation) for _, context, continuation in requests],
                self.methods,
                seed=self.seed,
                max_length=self.max_length,
                scoring=self.scoring,
                batch_rows=max(32, self.batch_size),
                tokenizer=self.tokenizer,
            )
        answers = [by_label[LABEL] for by_label in scored]
        for answer in answers:
            if answer.failure is not None:
                raise answer.failure
            self.records.append(cost_fields([answer]) | {"tokens": answer.tokens})
        return [(answer.logprob, answer.greedy) for answer in answers]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        if self.method.uses_budget or self.method.quantize is not None:
            raise UserError(
                f"rolling log-likelihoods have one token of context, of which {self.method_name!r} "
                "would compress nothing; allowed: method=exact (texts through a bounded cache: "
                "kvbench reproduce streams)"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = []
        for begin in range(0, len(requests), self.batch_size):
            batch = requests[begin : begin + self.batch_size]
            with kvbench_attention_on(self.model):
                talks = [self._talk(*request.args) for request in batch]
                generated = converse(self.model, talks, seed=self.seed)
            for answers in generated:
                (answer,) = answers[LABEL]
                if answer.failure is not None:
                    raise answer.failure
                text = str(self.tokenizer.decode(answer.tokens, skip_special_tokens=True))
                stop = list(answer.stopping.strings)
                texts.append(postprocess_generated_text(text, stop, self.think_end_token))
        return texts

    def _talk(
        self, context: str, gen_kwargs: Mapping[str, Any]
    ) -> tuple[Reading, list[list[Question]]]:
        """The prompt of a generation request, and what is asked about it."""
        options = normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks)
        samples = options.get("do_sample") or options.get("temperature")
        if samples or int(options.get("num_beams") or 1) > 1:
            raise UserError(
                f"generation kwargs ask for {'sampling' if samples else 'beams'} ({dict(gen_kwargs)}); "
                "allowed: greedy decoding"
            )
        max_new_tokens = int(options["max_gen_toks"])
        if max_new_tokens >= self.max_length:
            raise UserError(
                f"max_gen_toks is {max_new_tokens} and the model has {self.max_length} positions; "
                "allowed: fewer"
            )
        ids = self.tok_encode(context)[-(self.max_length - max_new_tokens) :]
        stopping = Stopping(
            max_new_tokens,
            end_token_ids(self.model, self.tokenizer),
            tuple(stop for stop in options.get("until") or () if stop),
            decode=lambda tokens: str(self.tokenizer.decode(tokens)),
            processors=acting_options(
                self.model.generation_config if self.generation_config else None, options
            ),
        )
        reading = read_prompt(
            self.model,
            self.tokenizer,
            ids,
            self.methods,
            seed=self.seed,
            held_back=int(self.compress_after == "all_but_last"),
            room=max_new_tokens,
        )
        return reading, [[Question((), stopping)]]

    def get_model_info(self) -> dict[str, Any]:
        """Method, budget and cost, which lm-evaluation-harness stores with its results."""
        kept = [record["ratio"] for record in self.records if record["ratio"] is not None]
        compressed = [float(record["compressed"]) for record in self.records]
        return {
            "kvbench_method": self.method_name,
            "kvbench_options": dict(self.options),
            "kvbench_budget": dict(vars(self.budget)),
            "kvbench_seed": self.seed,
            "kvbench_scoring": self.scoring,
            "kvbench_compress_after": self.compress_after,
            "kvbench_generation_config": self.generation_config,
            "kvbench_requests": len(self.records),
            "kvbench_compressed_share": fmean(compressed) if compressed else None,
            "kvbench_kept_ratio": fmean(kept) if kept else None,
            "model_dtype": str(self.model.dtype),
        }


ARGUMENTS = list(signature(KVBenchLM.__init__).parameters)[1:-1]  # without self and dotted


def method_options(
    method: str, method_args: str | Mapping[str, Any] | None, dotted: Mapping[str, Any]
) -> dict[str, Any]:
    given = json.loads(method_args) if isinstance(method_args, str) else method_args
    options = dict(given or {})
    for name, value in dotted.items():
        prefix, dot, option = name.partition(".")
        if not dot or prefix != method:
            raise UserError(
                f"model_args has unknown key {name!r}{_BEFORE.get(name) or nearest(name, ARGUMENTS)}; "
                "allowed: "
                f"{', '.join(ARGUMENTS)}, and options of the method as {method}.<option>"
            )
        options[option] = value
    return options
