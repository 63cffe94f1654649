"""What the scripts of this folder share: arguments, model and prompts, layers, CSV file and figure.

Keys of all: model (of conf/model, a Hub id or a folder), task (of conf/task, whose prompts are read),
options of both; limit (of the prompts), seed, device, dtype, results_dir, name (of the folder below).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from matplotlib.figure import Figure

from kvbench.cli.aliases import expand_model_paths
from kvbench.cli.catalogue import config_dir
from kvbench.cli.papers import paper_folders
from kvbench.engine.capture import capture_layers
from kvbench.engine.loading import full_attention_layers, resolve_device, resolve_dtype
from kvbench.errors import UserError
from kvbench.kv import LayerKV
from kvbench.probes.base import encoded_prompts
from kvbench.probes.layers import spread
from kvbench.run.session import Session

COMMON = {"limit": 8, "seed": 0, "device": "auto", "dtype": "auto", "results_dir": "runs"}


class Run:
    """One run of a script: its arguments as attributes, model and prompts when asked for."""

    def __init__(self, script: str, given: Sequence[str], model: str, task: str, **own: Any):
        """Read `given` over the defaults: model and task with their options, the `own` keys."""
        found: dict[str, Any] = {"name": Path(script).stem, **COMMON, **own}
        asked = {"model": model.split(), "task": task.split()}
        for text in given:
            key, equals, value = text.partition("=")
            group = key.partition(".")[0]
            if not equals or (group not in asked and key not in found):
                raise UserError(f"{text!r} is unknown; allowed: {', '.join([*asked, *found])}")
            if group not in asked:
                found[key] = yaml.safe_load(value)
            else:
                asked[group] = [text] if key == group else [*asked[group], text]
        self.overrides = [*expand_model_paths(asked["model"]), *asked["task"]]
        self.__dict__.update(found)

    @cached_property
    def config(self) -> Any:
        """Model and task, as the command line of kvbench composes them."""
        with initialize_config_dir(str(config_dir().resolve()), version_base=None):
            return compose("config", overrides=self.overrides)

    @cached_property
    def session(self) -> Session:
        """The model and its tokenizer."""
        spec = instantiate(self.config.model, _convert_="all")
        device = resolve_device(self.device)
        return Session(spec, device, resolve_dtype(self.dtype, device, spec.dtype), self.seed)

    def prompts(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Id and tokens of the task's first prompts."""
        task = instantiate(self.config.task, _convert_="all")
        return encoded_prompts(task, self.session, self.limit)

    def captured(self, ids: Sequence[int], layers: Any) -> Iterator[tuple[int, LayerKV]]:
        """A prompt's layers: a list of numbers from 1, so many evenly, or (None) all of them."""
        if not isinstance(layers, list):
            layers = spread(full_attention_layers(self.session.spec), layers)
        held = capture_layers(self.session.model, ids, [layer - 1 for layer in layers])
        return ((layer, held[layer - 1]) for layer in layers)

    def save(self, rows: list[Any], y: str, x: str, by: str, panel: str, fit: Any = None) -> None:
        """Write the rows, and a figure of the mean of `y` against `x`: a panel for each `panel`, a line
        for each `by`. Print these means, what was published and, where x lies between the two numbers of
        `fit`, the exponents of the power laws through the lines (least squares of logarithms)."""
        subject = self.session.spec.label if self.overrides else "synthetic"
        place = Path(self.results_dir, self.name, subject).expanduser()
        place.parent.mkdir(parents=True, exist_ok=True)
        frame, scale = pd.DataFrame(rows), "log" if fit else "linear"
        frame.to_csv(f"{place}.csv", index=False)
        figure = Figure(figsize=(12, 4), layout="constrained")
        parts = list(frame.groupby(panel, sort=False))
        axes = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
        for ax, (title, part) in zip(axes, parts, strict=True):
            part.pivot_table(y, x, by, sort=False).plot(ax=ax, marker=".", legend=ax is axes[-1])
            ax.set(title=f"{panel} {title}", ylabel=y, xscale=scale, yscale=scale)
        figure.savefig(f"{place}.png", dpi=150)
        print(frame.pivot_table(y, list(dict.fromkeys([panel, x])), by, sort=False).to_string())
        for names, part in frame[frame[x].between(*fit)].groupby([panel, by]) if fit else ():
            mean = part[part[y] > 0].groupby(x)[y].mean()
            slope = np.polyfit(np.log(mean.index), np.log(mean), 1)[0]
            print(f"{panel} {names[0]}, {by} {names[1]}: {y} as {x}^{slope:.3f}")
        for folder in paper_folders():
            if (published := folder / f"{self.name}.csv").is_file():
                print(f"published:\n{pd.read_csv(published).to_string(index=False)}")
        print(f"{len(rows)} rows: {place}.csv")


def started(main: Any) -> None:
    """Run a script with the command line's arguments; what it refuses is one line."""
    try:
        main(sys.argv[1:])
    except (UserError, InstantiationException) as error:
        sys.exit(f"kvbench: {error.__cause__ or error}")
