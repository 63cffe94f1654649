"""Tasks of lm-evaluation-harness in a job of kvbench, whose methods share prefills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from kvbench.errors import UserError, first_line, nearest
from kvbench.errors.options import Count, Distinct
from kvbench.lm_eval.released_masks import is_mask
from kvbench.lm_eval.scoring import Requests, Scoring, answer_requests, cost_fields, quietly
from kvbench.probes.base import Probe
from kvbench.run.plan import Fields, Methods, Work, WorkItem, failure_fields
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError, Tokens, in_turn
from kvbench.tasks.data import folder_digests


@dataclass(frozen=True, kw_only=True)
class HarnessTask(Probe):
    """Likelihood tasks of lm-evaluation-harness, with one record per document and method.

    A document's context without its last token is prefilled once for all methods and for all choices
    that share it, and compressed by every method. `kvbench.lm_eval.KVBenchLM` gives the same numbers
    from the harness's own command line, where it also generates and applies chat templates.
    conf/task/lm_eval.yaml tells the options; a task without the `metric` takes its first one.
    """

    name: ClassVar[str] = "lm_eval"
    score_unit: ClassVar[str] = "fraction"
    unit: ClassVar[str] = "document"

    tasks: Distinct[str] = ()
    num_fewshot: Annotated[int, Ge(0), Le(1000)] | None = None
    include_path: str | None = None
    per_dataset: Count | None = None
    metric: str = "acc"
    scoring: Scoring = "sum"
    max_length: Tokens | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise TaskError(
                f"task.include_path is {self.include_path!r}; allowed: a folder, or null"
            )

    def meta(self) -> dict[str, Any]:
        data = {} if self.include_path is None else folder_digests(self.include_path)
        return super().meta() | {"data": data}

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        folder = None if self.include_path is None else str(Path(self.include_path).resolve())
        try:
            with quietly(), chdir(folder or "."):
                manager = TaskManager(include_path=folder, include_defaults=folder is None)
                known = list(manager.all_tasks)
                listed = "what lm_eval ls tasks lists" if folder is None else ", ".join(known[:12])
                for name in set(self.tasks) - set(known):
                    raise TaskError(
                        f"task {name!r} is unknown to lm-evaluation-harness{nearest(name, known)}; "
                        f"allowed: {listed}"
                    )
                loaded = manager.load(list(self.tasks))["tasks"]
        except (TaskError, MemoryError):
            raise
        except Exception as error:
            # The loader of a data set may raise anything.
            raise TaskError(
                f"tasks {', '.join(self.tasks)} cannot be loaded: {first_line(error)}; allowed: with "
                "their data (a network, once), or task.include_path=<a folder>"
            ) from error
        for task in loaded.values():
            if self.num_fewshot is not None:
                task.set_config(key="num_fewshot", value=self.num_fewshot)
            # lm-evaluation-harness's default.
            task.set_fewshot_seed(seed=1234)
        return dict(loaded)

    def items(self, session: Session, methods: Methods) -> Sequence[WorkItem]:
        """One item per document. The first documents of all tasks come first, then the second ones, and
        so on.
        """
        if session.compress_after != "all_but_last":
            for label, (method, _) in methods.items():
                if not is_mask(method):
                    raise TaskError(
                        f"compress_after is {session.compress_after!r} and {label!r} takes likelihoods "
                        "from its cache; allowed: all_but_last (a mask over prompt and answer, which "
                        "holds no cache, has no such choice)"
                    )

        @cache
        def encoding() -> Requests:
            length = self.max_length or session.encoder.max_positions
            return Requests(session.model, session.tokenizer, max_length=length)

        by_task = []
        for name, task in self._loaded.items():
            items = []
            documents = _requests_by_document(name, task)
            for doc_id, requests in sorted(documents.items())[: self.per_dataset]:
                key = f"{name}-{doc_id:05d}"
                fields = {key: {"dataset": name, "document": key}}
                items.append(WorkItem(key, (key,), (task, requests, encoding), fields))
            by_task.append(items)
        return in_turn(by_task)

    def run(self, work: Sequence[Work], session: Session) -> Iterator[Fields]:
        ((item, methods),) = work
        task, requests, encoding = item.payload
        encoder = encoding()
        shared = {
            **item.fields[item.id],
            "num_fewshot": task.config.num_fewshot or 0,
            "prompt_tail": str(requests[0].args[0])[-200:],
        }
        answers = answer_requests(
            session.model,
            encoder.loglikelihood(requests, disable_tqdm=True),
            methods,
            seed=session.seed,
            max_length=encoder.max_length,
            scoring=self.scoring,
            tokenizer=session.tokenizer,
        )
        for label in methods:
            by_request = [answer[label] for answer in answers]
            fields = {**shared, **cost_fields(by_request)}
            failures = [answer.failure for answer in by_request if answer.failure is not None]
            if failures:
                fields |= failure_fields(failures[0])
            else:
                logprobs = [answer.logprob for answer in by_request]
                responses = [(answer.logprob, answer.greedy) for answer in by_request]
                fields |= self._scored(task, requests, responses)
                fields["logprobs"] = logprobs
                if len(logprobs) > 1:
                    best = logprobs.index(max(logprobs))
                    fields["prediction"] = str(requests[best].args[1])
            yield {"method": label, "example_id": item.id, **fields}

    def _scored(
        self, task: Any, requests: Sequence[Instance], responses: Sequence[Any]
    ) -> dict[str, Any]:
        """The harness's metrics of a document."""
        for request, response in zip(requests, responses, strict=True):
            request.resps = [response]
            request.filtered_resps = {}
        chosen = task._filters[0]
        chosen.apply(list(requests))
        filtered = [request.filtered_resps[chosen.name] for request in requests]
        results = task.process_results(requests[0].doc, filtered)
        metrics = {
            name: float(value) for name, value in results.items() if isinstance(value, int | float)
        }
        if not metrics:
            raise UserError(f"task {requests[0].task_name!r} has no metric of single documents")
        first = next(iter(metrics.values()))
        return {**metrics, "score": metrics.get(self.metric, first)}


def _requests_by_document(name: str, task: Any) -> dict[int, list[Instance]]:
    try:
        with quietly():
            task.build_all_requests(rank=0, world_size=1)
    except ValueError as error:
        raise TaskError(
            f"task {name!r} cannot be put with task.num_fewshot={task.config.num_fewshot}: "
            f"{first_line(error)}; allowed: fewer examples than it has"
        ) from error
    documents: dict[int, list[Instance]] = {}
    for request in task.instances:
        if request.request_type != "loglikelihood":
            raise TaskError(
                f"task {name!r} asks for {request.request_type}; allowed: loglikelihood (others "
                "with python -m kvbench.lm_eval --model kvbench)"
            )
        documents.setdefault(request.doc_id, []).append(request)
    return documents
