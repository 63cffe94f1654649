"""What the scripts of this folder share: arguments, model and prompts, layers, CSV file and figure.

Keys: model, task (whose prompts are read), their options; limit, seed, device, dtype, results_dir, name;
dry_run=true checks all of them, and loads and writes nothing.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from _output import write
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.cli.build import constructed, model_line
from kvbench.cli.config import composed, expanded, hydra_of_conf
from kvbench.engine.architecture import compressible_layers
from kvbench.engine.model_spec import ModelSpec, resolve_device, resolve_dtype
from kvbench.engine.prefill import capture_layers
from kvbench.errors import UserError, complain
from kvbench.kv import LayerKV
from kvbench.probes.base import encoded_prompts
from kvbench.report.item import RunNote
from kvbench.run.session import Session
from kvbench.tasks.base import Task


def spread(layers: Sequence[int], most: int | None) -> list[int]:
    """`most` of the layers, evenly spread from the first to the last; all of them for None."""
    last, count = len(layers) - 1, min(most or len(layers), len(layers))
    return [layers[i * last // max(1, count - 1)] for i in range(count)]


class Run(SimpleNamespace):
    """One run of a script: its arguments as attributes, model and prompts when asked for."""

    def __init__(self, script: str, given: Sequence[str], model: str, task: str, **own: Any):
        """Read `given` over the defaults: model and task with their options, the `own` keys."""
        found = {"limit": 8, "seed": 0, "device": "auto", "dtype": "auto", "results_dir": "runs"}
        found |= {
            "name": Path(script).stem,
            "synthetic": not model,
            "dry_run": False,
            "small": None,
            **own,
        }
        said = {text.partition("=")[0] for text in given}
        self.overrides = [] if "model" in said else model.split()
        self.overrides += [] if "task" in said else task.split()
        for text in given:
            key, _, value = text.partition("=")
            if key in found:
                found[key] = yaml.safe_load(value)
            elif key.lstrip("+").partition(".")[0] not in ("model", "task"):
                raise UserError(f"{text!r} is unknown; allowed: model, task, {', '.join(found)}")
            else:
                self.overrides.append(text)
        super().__init__(**found)
        if self.dry_run:
            print(self.check())
            sys.exit(0)

    def check(self) -> str:
        """Make what model and task name, without loading anything; a line that says what was checked.

        Raises:
            UserError: what the run would be refused for.
        """
        if self.synthetic:
            return "settings checked: no model is read"
        config: Any = OmegaConf.to_container(self.config(), resolve=True)
        spec: ModelSpec = constructed(config["model"], "model", ModelSpec)
        task: Task = constructed(config["task"], "task", Task)
        return f"settings checked: {model_line(spec)}, task {type(task).__name__}"

    def config(self, *more: str) -> Any:
        """Model and task, with further overrides, as the command line of kvbench composes them."""
        with hydra_of_conf() as hydra:
            return composed(hydra, expanded([*self.overrides, *more]))

    @cached_property
    def session(self) -> Session:
        """The model and its tokenizer."""
        spec = instantiate(self.config().model, _convert_="all")
        device = resolve_device(self.device)
        return Session(spec, device, resolve_dtype(self.dtype, device, spec.dtype), self.seed)

    def prompts(self, *more: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Id and tokens of the task's first prompts."""
        task = instantiate(self.config(*more).task, _convert_="all")
        for each in encoded_prompts(task, self.session, self.limit):
            yield each.example.id, (*each.context_ids, *each.question_ids)

    def captured(self, ids: Sequence[int], layers: Any) -> Iterator[tuple[int, LayerKV]]:
        """A prompt's layers: a list of numbers from 1, so many evenly, or (None) all of them."""
        every = [layer + 1 for layer in compressible_layers(self.session.model)]
        wanted = layers if isinstance(layers, list) else spread(every, layers)
        held = capture_layers(self.session.model, ids, [layer - 1 for layer in wanted])
        return ((layer, held[layer - 1]) for layer in wanted)

    @property
    def place(self) -> Path:
        """Path of this run's files without their suffix; the file is named after the model."""
        subject = "synthetic" if self.synthetic else self.session.spec.label
        return Path(self.results_dir, self.name, subject).expanduser()

    def save(
        self, rows: list[Any], *, y: str, x: str, by: str, panel: str, fit: Any = None
    ) -> None:
        """See `_output.write` and `kvbench.report.item.RunNote`."""
        command = shlex.join(["python", *sys.argv])
        note = RunNote(self.place.name, command, y, x, by, panel, self.small or "")
        write(rows, self.place, note, fit)


def started(main: Any) -> None:
    """Run a script with the command line's arguments; what it refuses is one line."""
    try:
        main(sys.argv[1:])
    except (UserError, HydraException) as error:
        complain(str(error if isinstance(error, UserError) else error.__cause__ or error))
        sys.exit(2)
