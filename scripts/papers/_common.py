"""What the scripts of this folder share: arguments, model and prompts, layers, CSV file and figure.

Keys of all: model (of conf/model, a Hub id or a folder), task (of conf/task, whose prompts are read) and
options of both; limit (of the prompts), seed, device, dtype, results_dir, name (of the folder below it).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import yaml
from _figures import lines
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from kvbench.engine.capture import capture_layers

from kvbench.cli.catalogue import config_dir, paper_folders
from kvbench.cli.config import expanded
from kvbench.engine.loading import full_attention_layers, resolve_device, resolve_dtype
from kvbench.errors import UserError, complain
from kvbench.kv import LayerKV
from kvbench.probes.base import encoded_prompts
from kvbench.probes.layers import spread
from kvbench.run.session import Session

COMMON = {"limit": 8, "seed": 0, "device": "auto", "dtype": "auto", "results_dir": "runs"}


class Run(SimpleNamespace):
    """One run of a script: its arguments as attributes, model and prompts when asked for."""

    def __init__(self, script: str, given: Sequence[str], model: str, task: str, **own: Any):
        """Read `given` over the defaults: model and task with their options, the `own` keys. Without
        a model (`synthetic`) files are named so."""
        found = {"name": Path(script).stem, **COMMON, "synthetic": not model, **own}
        said = {text.partition("=")[0] for text in given}
        self.overrides = [] if "model" in said else model.split()
        self.overrides += [] if "task" in said else task.split()
        for text in given:
            key, equals, value = text.partition("=")
            if key in found and equals:
                found[key] = yaml.safe_load(value)
            elif key.partition(".")[0] in ("model", "task") and equals:
                self.overrides.append(text)
            else:
                raise UserError(f"{text!r} is unknown; allowed: model, task, {', '.join(found)}")
        super().__init__(**found)

    def config(self, *more: str) -> Any:
        """Model and task, with further overrides, as the command line of kvbench composes them."""
        words = expanded([*self.overrides, *more])
        with initialize_config_dir(str(config_dir().resolve()), version_base=None):
            return compose("config", overrides=words)

    @cached_property
    def session(self) -> Session:
        """The model and its tokenizer."""
        spec = instantiate(self.config().model, _convert_="all")
        device = resolve_device(self.device)
        return Session(spec, device, resolve_dtype(self.dtype, device, spec.dtype), self.seed)

    def prompts(self, *more: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Id and tokens of the task's first prompts."""
        task = instantiate(self.config(*more).task, _convert_="all")
        return encoded_prompts(task, self.session, self.limit)

    def captured(self, ids: Sequence[int], layers: Any) -> Iterator[tuple[int, LayerKV]]:
        """A prompt's layers: a list of numbers from 1, so many evenly, or (None) all of them."""
        if not isinstance(layers, list):
            layers = spread(full_attention_layers(self.session.spec), layers)
        held = capture_layers(self.session.model, ids, [layer - 1 for layer in layers])
        return ((layer, held[layer - 1]) for layer in layers)

    def save(self, rows: list[Any], y: str, x: str, by: str, panel: str, fit: Any = None) -> None:
        """Write the rows and a figure (`_figures.lines`); print means of `y` and what was published."""
        subject = "synthetic" if self.synthetic else self.session.spec.label
        place = Path(self.results_dir, self.name, subject).expanduser()
        place.parent.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(rows)
        frame.to_csv(f"{place}.csv", index=False)
        print(frame.pivot_table(y, list(dict.fromkeys([panel, x])), by, sort=False).to_string())
        figure = lines(frame, y, x, by, panel, fit)
        figure.savefig(f"{place}.png", dpi=150, bbox_inches="tight")
        for file in (folder / f"{self.name}.csv" for folder in paper_folders()):
            if file.is_file():
                print(f"published:\n{pd.read_csv(file).to_string(index=False)}")
        print(f"{len(rows)} rows: {place}.csv")


def started(main: Any) -> None:
    """Run a script with the command line's arguments; what it refuses is one line."""
    try:
        main(sys.argv[1:])
    except (UserError, HydraException) as error:
        complain(str(error.__cause__ or error))
        sys.exit(2)
