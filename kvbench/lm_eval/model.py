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

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.fork import prompt_name
from kvbench.engine.generate import Prompt, run_batch
from kvbench.engine.loading import load_model
from kvbench.engine.model_spec import ModelSpec, resolve_device, resolve_dtype
from kvbench.engine.stopping import Stopping
from kvbench.engine.tokenizer import end_token_ids, load_tokenizer
from kvbench.errors import UserError, nearest
from kvbench.errors.options import fits, refusal
from kvbench.kv import Budget
from kvbench.lm_eval.scoring import Requests, Scoring, answer_requests, held
from kvbench.methods import build_method
from kvbench.tasks.base import PromptEncoder

log = logging.getLogger(__name__)

LABEL = "method"
ALLOWED = {"scoring": Scoring, "protocol": Literal["prompt", "minus_last"], "seed": int}
"""Hints of arguments that nothing else checks."""


@register_model("kvbench")
class KVBenchLM(Requests):
    """Likelihoods and generations from a compressed cache.

    A likelihood request compresses all but the context's last token; that token and the continuation
    are fed to the compressed cache, so that the first token of an answer (of most tasks the only one) is
    scored on it as well. Requests of one context share its prefill. What lm-evaluation-harness makes
    of the numbers is its own.

    Args:
        pretrained: a local folder, a Hub id, or ``asset:recall_mini``.
        method: a file name of kvbench/methods; method_args: its options (JSON or a mapping), over which
            those go that are written ``snapkv.kernel_size=7``.
        rate, sink, window, size, total_rate: the budget, see `kvbench.kv.Budget`. A budget below the
            default sink and window (H2O goes to 4 %): ``total_rate=0.04,sink=0,window=0``.
        scoring: sum | mean (log-probability per token, as H2O's released evaluation has it).
        protocol: of generations: prompt (the papers': the whole prompt is compressed, the first token
            comes from the exact prefill) | minus_last (as likelihoods).
        batch_size: prompts that generate together, and a measure of rows that are scored together.
        add_bos_token: of HFLM; None: as the tokenizer does.
        max_length: tokens of context and continuation; None: the model's positions.

    Attributes:
        records: one mapping per likelihood request since the model was made, in the order answered:
            tokens, entries and bytes held, whether it was compressed, for which lm-eval's result has no
            place.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "exact",
        method_args: str | Mapping[str, Any] | None = None,
        *,
        rate: float = 0.25,
        sink: int = 32,
        window: int = 32,
        size: int | None = None,
        total_rate: float | None = None,
        seed: int = 0,
        scoring: Scoring = "sum",
        protocol: str = "prompt",
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
        del max_batch_size, metadata  # the evaluator puts them among the arguments
        for name, value in (("scoring", scoring), ("protocol", protocol), ("seed", seed)):
            if not fits(ALLOWED[name], value):
                raise UserError(refusal(f"model_args {name}", value, ALLOWED[name]))
        given = json.loads(method_args) if isinstance(method_args, str) else method_args
        self.options = dict(given or {})
        for name, value in dotted.items():
            of, dot, option = name.partition(".")
            if not dot or of != method:
                raise UserError(
                    f"model_args has unknown key {name!r}{nearest(name, ARGUMENTS)}; allowed: "
                    f"{', '.join(ARGUMENTS)}, and options of the method as {method}.<option>"
                )
            self.options[option] = value
        self.scoring, self.protocol = scoring, protocol
        self.method_name, self.seed = method, seed
        self.method = build_method(method, **self.options)
        self.method.quantization()
        self.budget = Budget(rate=rate, sink=sink, window=window, size=size, total_rate=total_rate)
        self.methods = {LABEL: (self.method, self.budget)}
        spec = ModelSpec(
            name=pretrained,
            path=pretrained,
            revision=revision,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
        )
        if device and device.startswith("cuda") and not torch.cuda.is_available():
            log.warning("device is %s, which the command line has by default; no GPU: cpu", device)
            device = "cpu"
        where = resolve_device(device or "auto")
        model = load_model(spec, device=where, dtype=resolve_dtype(dtype, where), seed=seed)
        super().__init__(
            model,
            load_tokenizer(spec),
            max_length=max_length,
            add_bos_token=add_bos_token,
            batch_size=batch_size if isinstance(batch_size, int) else 8,
            think_end_token=think_end_token,
            enable_thinking=enable_thinking,
        )
        self.records: list[dict[str, Any]] = []

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse ``--use_cache``, whose key knows neither method nor rate.

        Raises:
            UserError: always, when a cache of answers is wrapped around the model.
        """
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
        """(log-likelihood, greedy) of each request of token ids.

        Raises:
            BudgetExceeded, and whatever else stopped the method.
        """
        with kvbench_attention_on(self.model):
            scored = answer_requests(
                self.model,
                [(context, continuation) for _, context, continuation in requests],
                self.methods,
                seed=self.seed,
                max_length=self.max_length,
                scoring=self.scoring,
                batch_rows=max(32, self.batch_size),
                encoder=PromptEncoder(self.tokenizer),
            )
        answers = [by_label[LABEL] for by_label in scored]
        for answer in answers:
            if answer.failure is not None:
                raise answer.failure
            self.records.append(held([answer]) | {"tokens": answer.tokens})
        return [(answer.logprob, answer.greedy) for answer in answers]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows that have one token of context, as HFLM's.

        Raises:
            UserError: another method than exact, which would compress nothing.
        """
        if self.method.uses_budget or self.method.quantize is not None:
            raise UserError(
                f"rolling log-likelihoods have one token of context, of which {self.method_name!r} "
                "would compress nothing; allowed: method=exact (texts through a bounded cache: "
                "kvbench task=stream)"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, in the order asked.

        Raises:
            UserError: sampling, or more new tokens than the model has positions.
            BudgetExceeded, and whatever else stopped the method.
        """
        after = "prompt" if self.protocol == "prompt" else "context"
        texts: list[str] = []
        for begin in range(0, len(requests), self.batch_size):
            part = requests[begin : begin + self.batch_size]
            prompts = [self._prompt(*request.args) for request in part]
            with kvbench_attention_on(self.model):
                generated = run_batch(self.model, prompts, seed=self.seed, compress_after=after)
            for answers, prompt in zip(generated, prompts, strict=True):
                answer, until = answers[LABEL], list(prompt.stopping.strings)
                if answer.failure is not None:
                    raise answer.failure
                text = str(self.tokenizer.decode(answer.tokens, skip_special_tokens=True))
                texts.append(postprocess_generated_text(text, until, self.think_end_token))
        return texts

    def _prompt(self, context: str, given: Mapping[str, Any]) -> Prompt:
        """A generation request; all but its last token are the context."""
        options = normalize_gen_kwargs(dict(given), self.max_gen_toks)
        if options.get("do_sample") or options.get("temperature"):
            raise UserError(
                f"generation kwargs ask for sampling ({dict(given)}); allowed: greedy decoding"
            )
        most = int(options["max_gen_toks"])
        if most >= self.max_length:
            raise UserError(
                f"max_gen_toks is {most} and the model has {self.max_length} positions; allowed: fewer"
            )
        ids = self.tok_encode(context)[-(self.max_length - most) :]
        stopping = Stopping(
            most,
            end_token_ids(self.model, self.tokenizer),
            tuple(stop for stop in options.get("until") or () if stop),
            decode=lambda tokens: str(self.tokenizer.decode(tokens)),
        )
        encoder = PromptEncoder(self.tokenizer)
        return Prompt(ids[:-1], ids[-1:], self.methods, stopping, prompt_name(ids), encoder=encoder)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval keeps beside its results: method, budget, protocol, and how much was kept."""
        kept = [record["ratio"] for record in self.records if record["ratio"] is not None]
        compressed = [float(record["compressed"]) for record in self.records]
        return {
            "kvbench_method": self.method_name,
            "kvbench_options": dict(self.options),
            "kvbench_budget": dict(vars(self.budget)),
            "kvbench_seed": self.seed,
            "kvbench_scoring": self.scoring,
            "kvbench_generation_protocol": self.protocol,
            "kvbench_requests": len(self.records),
            "kvbench_compressed_share": fmean(compressed) if compressed else None,
            "kvbench_kept_ratio": fmean(kept) if kept else None,
            "model_dtype": str(self.model.dtype),
        }


_, *ARGUMENTS, _ = signature(KVBenchLM.__init__).parameters  # without self and **dotted
