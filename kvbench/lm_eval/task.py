"""Tasks of lm-evaluation-harness as a plan: all methods of a job answer from shared prefills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from kvbench.errors import UserError, first_line, nearest
from kvbench.errors.options import Count, Distinct
from kvbench.lm_eval.scoring import Requests, Scoring, answer_requests, held, quietly
from kvbench.probes.base import Probe, failed
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError, Tokens
from kvbench.tasks.data import file_digests


@dataclass(frozen=True, kw_only=True)
class HarnessTask(Probe):
    """Any likelihood task of lm-evaluation-harness, one record per document and method.

    All but the last token of a document's context are compressed, once for all of its choices and
    methods where they share it; see `kvbench.lm_eval.KVBenchLM`, which gives the same numbers on that
    harness's own side, and there generates, too, and knows chat templates.

    Attributes:
        tasks: names as that harness has them.
        num_fewshot: examples before each question; None: as the task says.
        include_path: a folder with YAML files of tasks; data files that they name are relative to it.
        per_dataset: the first so many documents of each task; None: all.
        metric: which of a task's metrics is the score; where it has no such, its first one.
        scoring: sum | mean (per token, as H2O's released evaluation has it).
        max_length: tokens of context and continuation; None: the model's positions.
    """

    name: ClassVar[str] = "lm_eval"
    score_unit: ClassVar[str] = "fraction"
    repetition: ClassVar[str] = "document"

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
        """See `Probe.meta`; `data`: sha256 of each file in `include_path`."""
        files = [f"{self.include_path}/*.{end}" for end in ("yaml", "json*", "py")]
        return super().meta() | {"data": dict(file_digests(files if self.include_path else []))}

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        """The tasks by name, their few-shot examples and data included.

        Raises:
            TaskError: an unknown task, or data that cannot be had.
        """
        folder = None if self.include_path is None else str(Path(self.include_path).resolve())
        try:
            with quietly(), chdir(folder or "."):
                manager = TaskManager(include_path=folder, include_defaults=folder is None)
                known = list(manager.all_tasks)
                for name in set(self.tasks) - set(known):
                    raise TaskError(
                        f"task {name!r} is unknown to lm-evaluation-harness{nearest(name, known)}; "
                        f"allowed: {'its list' if folder is None else ', '.join(known[:12])}"
                    )
                loaded = manager.load(list(self.tasks))["tasks"]
        except (TaskError, MemoryError):
            raise
        except Exception as error:  # whatever a data set's loader raises
            raise TaskError(
                f"tasks {', '.join(self.tasks)} cannot be loaded: {first_line(error)}; allowed: with "
                "their data (a network, once), or task.include_path=<a folder>"
            ) from error
        for task in loaded.values():
            if self.num_fewshot is not None:
                task.set_config(key="num_fewshot", value=self.num_fewshot)
            task.set_fewshot_seed(seed=1234)  # lm-evaluation-harness's default
        return dict(loaded)

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per document, the tasks in turn.

        Raises:
            TaskError: tasks that are unknown or lack data; requests of a kind that is not served.
        """

        @cache
        def encoding() -> Requests:  # of requests, once the model is loaded
            length = self.max_length or session.encoder.max_positions
            return Requests(session.model, session.tokenizer, max_length=length)

        by_task = []
        for name, task in self._loaded.items():
            try:
                with quietly():
                    task.build_all_requests(rank=0, world_size=1)
            except ValueError as error:  # of the sampler
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
            units = []
            for doc_id, requests in sorted(documents.items())[: self.per_dataset]:
                key = f"{name}-{doc_id:05d}"
                fields = {key: {"dataset": name, "document": key}}
                units.append(Unit(key, (key,), (task, requests, encoding), fields))
            by_task.append(units)
        return [unit for turn in zip_longest(*by_task) for unit in turn if unit is not None]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """All requests of a document under every method."""
        task, requests, encoding = unit.payload
        side = encoding()
        shared = {
            **unit.fields[unit.id],
            "num_fewshot": task.config.num_fewshot or 0,
            "prompt_tail": str(requests[0].args[0])[-200:],
        }
        answers = answer_requests(
            session.model,
            side.loglikelihood(requests, disable_tqdm=True),
            methods,
            seed=session.seed,
            max_length=side.max_length,
            scoring=self.scoring,
            encoder=session.encoder,
        )
        for label in methods:
            mine = [answer[label] for answer in answers]
            fields = {**shared, **held(mine)}
            failure = next((a.failure for a in mine if a.failure is not None), None)
            if failure is not None:
                fields |= failed(failure)
            else:
                fields |= self._scored(task, requests, [(a.logprob, a.greedy) for a in mine])
                fields["logprobs"] = [a.logprob for a in mine]
                if len(mine) > 1:
                    best = max(range(len(mine)), key=lambda i: mine[i].logprob)
                    fields["prediction"] = str(requests[best].args[1])
            yield Outcome(label, unit.id, fields)

    def _scored(
        self, task: Any, requests: Sequence[Instance], responses: Sequence[Any]
    ) -> dict[str, Any]:
        """What the task itself makes of the responses to a document's requests."""
        for request, response in zip(requests, responses, strict=True):
            request.resps = [response]
            request.filtered_resps = {}
        chosen = task._filters[0]
        chosen.apply(list(requests))
        filtered = [request.filtered_resps[chosen.name] for request in requests]
        results = task.process_results(requests[0].doc, filtered)
        numbers = {k: float(v) for k, v in results.items() if isinstance(v, int | float)}
        if not numbers:
            raise UserError(f"task {requests[0].task_name!r} has no metric of single documents")
        score = numbers.get(self.metric, next(iter(numbers.values())))
        return {**numbers, "score": score}
