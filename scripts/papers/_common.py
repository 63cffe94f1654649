"""The frame of the scripts of this folder: the command line, the model and its prompts, their layers,
and the files of a run.

Every script takes words of the form key=value:

    model, task        what conf/model and conf/task name, with their options (task.tokens=512)
    limit              how many of the task's prompts are read, the first ones (8)
    seed               of everything that is drawn (0)
    device, dtype      cpu or cuda, float32 or bfloat16; auto: what fits the machine
    results_dir, name  folder of the results (runs), and the run's folder in it (the script's name)
    dry_run            true: check all of these, load nothing, write nothing

and the keys of its own, which its `main` explains. `kvbench reproduce <item>` passes those of the
paper's run. A run writes three files to <results_dir>/<name>, all named after the model: the rows as
CSV, the figure of their means as PNG, and what the page needs of them as JSON; and, where <name> is an
item of results/paper/experiments.yaml, the page report.html. It prints the means and where the files
are. A small run (model=recall_mini limit=1) takes 16 s of one core and more, most of it for the start;
conf/README-experiments.md says what the papers' own runs need.
"""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import yaml
from _item import COMMENT, RunNote, means_of, write_item_page
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from pandas.api.types import is_numeric_dtype

from kvbench.cli.build import model_line
from kvbench.cli.config import composed, expanded, hydra_of_conf
from kvbench.cli.construct import constructed
from kvbench.cli.items import paper_items
from kvbench.engine.architecture import compressible_layers
from kvbench.engine.model import ModelSpec, resolve_device, resolve_dtype
from kvbench.engine.prefill import capture_layers
from kvbench.errors import UserError, complain
from kvbench.kv import LayerKV
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.probes.base import encoded_prompts
from kvbench.report.papers import paper_folders
from kvbench.run.session import Session
from kvbench.tasks.base import Task

WIKITEXT = "task=text task.dataset=Salesforce/wikitext task.config=wikitext-103-raw-v1"
"""WikiText-103, the text of H2O's figures, as overrides."""
TRIVIAQA = "task=longbench task.datasets=[triviaqa]"
"""TriviaQA, whose prompts BalanceKV's single layers are of, as overrides."""


def random_number(count: int, seed: int) -> int:
    return random.Random(seed).randint(1, count)


def chosen_layers(numbers: Sequence[int], layers: Any, seed: int) -> list[int]:
    """Which of a model's layers to read.

    Args:
        numbers: those that there are.
        layers: a list, which is returned as it is; how many, evenly spread from the first to the last;
            "random": one; None: all.
        seed: of the random layer.
    """
    if layers == "random":
        return [numbers[random_number(len(numbers), seed) - 1]]
    if isinstance(layers, list):
        return layers
    count = min(layers or len(numbers), len(numbers))
    last = len(numbers) - 1
    return [numbers[i * last // max(1, count - 1)] for i in range(count)]


def method_with(options: Mapping[str, Any], name: str) -> Method:
    """The method with these options: of the name that they hold under "name", else of `name`."""
    others = dict(options)
    return build_method(others.pop("name", name), **others)


class Run(SimpleNamespace):
    """One run of a script: its keys as attributes; model and prompts, which are loaded when they are
    first asked for."""

    def __init__(
        self, script: str, arguments: Sequence[str], model: str, task: str, **own: Any
    ) -> None:
        """Read the command line; with dry_run=true, check it and exit.

        Args:
            script: path of the script.
            arguments: the words of the command line.
            model, task: overrides that hold where the command line names none; both empty: the script
                draws its data, unless synthetic=false and a model say otherwise.
            own: the script's own keys, with their defaults.
        """
        values: dict[str, Any] = {
            "limit": 8,
            "seed": 0,
            "device": "auto",
            "dtype": "auto",
            "results_dir": "runs",
            "name": Path(script).stem,
            "synthetic": not model,
            "dry_run": False,
            "small": None,
            **own,
        }
        named = {argument.partition("=")[0] for argument in arguments}
        self.overrides = [] if "model" in named else model.split()
        self.overrides += [] if "task" in named else task.split()
        for argument in arguments:
            key, _, value = argument.partition("=")
            if key in values:
                values[key] = yaml.safe_load(value)
            elif key.lstrip("+").partition(".")[0] in ("model", "task"):
                self.overrides.append(argument)
            else:
                allowed = ", ".join(values)
                raise UserError(f"{argument!r} is unknown; allowed: model, task, {allowed}")
        super().__init__(**values)
        if self.dry_run:
            print(self.check())
            sys.exit(0)

    def check(self) -> str:
        """Make what model and task name, without loading anything; a line that says what was checked."""
        if self.synthetic:
            return "settings checked: no model is read"
        task = type(self.task()).__name__
        return f"settings checked: {model_line(self._made('model', ModelSpec))}, task {task}"

    def task(self, *more: str) -> Any:
        """The task, with further overrides."""
        return self._made("task", Task, *more)

    def _made(self, key: str, kind: type, *more: str) -> Any:
        """Model or task, as the command line of kvbench makes them."""
        with hydra_of_conf() as hydra:
            config = composed(hydra, expanded([*self.overrides, *more]))
        return constructed(OmegaConf.to_container(config[key], resolve=True), key, kind)

    @cached_property
    def session(self) -> Session:
        spec: ModelSpec = self._made("model", ModelSpec)
        device = resolve_device(self.device)
        return Session(spec, device, resolve_dtype(self.dtype, device, spec.dtype), self.seed)

    def prompts(self, *more: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Id and tokens of the task's first `limit` prompts; `more`: further overrides."""
        for prompt in encoded_prompts(self.task(*more), self.session, self.limit):
            yield prompt.example.id, prompt.ids

    def layer_numbers(self, layers: Any) -> list[int]:
        """Numbers, from 1, of the model's layers that `layers` asks for: see `chosen_layers`."""
        numbers = [index + 1 for index in compressible_layers(self.session.model)]
        return chosen_layers(numbers, layers, self.seed)

    def captured(self, ids: Sequence[int], layers: Any) -> Iterator[tuple[int, LayerKV]]:
        """The layers of a prompt that `layers` asks for (see `chosen_layers`), each with its number."""
        numbers = self.layer_numbers(layers)
        layer_of_index = capture_layers(self.session.model, ids, [n - 1 for n in numbers])
        return ((number, layer_of_index[number - 1]) for number in numbers)

    def every_layer(self) -> Iterator[tuple[str, int, LayerKV]]:
        """Prompt, number and tensors of each layer that the key `layers` asks for, of all prompts."""
        for prompt, ids in self.prompts():
            for number, layer in self.captured(ids, self.layers):
                yield prompt, number, layer

    @property
    def place(self) -> Path:
        """Path of this run's files, without their endings."""
        subject = "synthetic" if self.synthetic else self.session.spec.label
        return Path(self.results_dir, self.name, subject).expanduser()

    def save(
        self,
        rows: list[dict[str, Any]],
        *,
        y: str,
        x: str,
        by: str,
        panel: str,
        fit: tuple[float, float] | None = None,
        log: bool = False,
        part: str = "",
    ) -> None:
        """Write the rows and what is made of them: see `_item.RunNote` for the columns,
        `write` for `fit` and `log`; `part` names the second table of a run, and its files."""
        command = shlex.join(["python", *sys.argv])
        subject = f"{self.place.name}, {part}" if part else self.place.name
        note = RunNote(subject, command, y, x, by, panel, self.small or "")
        place = self.place.with_name(f"{self.place.name}_{part}") if part else self.place
        write(rows, place, note, fit, log)


def write(
    rows: list[dict[str, Any]],
    place: Path,
    note: RunNote,
    fit: tuple[float, float] | None = None,
    log: bool = False,
) -> None:
    """Write the rows as CSV, the mean of `note.y` against `note.x` as a figure, and the page of the
    item that the folder is named after; print the means, and what results/paper has of that item.

    Args:
        place: path of the files, without their endings.
        fit: two values of x. With it the axes are logarithmic, and the exponent of each line's power
            law between the two is printed (least squares of logarithms).
        log: whether the axes are logarithmic without `fit`.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows)
    first_line = f"{COMMENT} {note.small}\n" if note.small else ""
    Path(f"{place}.csv").write_text(first_line + frame.to_csv(index=False), encoding="utf-8")
    print(means_of(frame, note).to_string())
    figure = figure_of_means(frame, note, fit, log)
    figure.savefig(f"{place}.png", dpi=150, bbox_inches="tight")
    note.write(place)
    item = paper_items().get(place.parent.name.removesuffix("_small"))
    if item is not None:
        page = write_item_page(
            place.parent,
            title=item.name,
            paper=item.title,
            shows=item.shows,
            differs=item.differs,
        )
        print(f"page: {page}")
    print_published(place.parent.name)
    print(f"{len(rows)} rows: {place}.csv")


def print_published(item: str) -> None:
    """Print the published numbers of an item, where results/paper has some."""
    for folder in paper_folders():
        file = folder / f"{item}.csv"
        if file.is_file():
            published = pd.read_csv(file, dtype=str)
            models = ", ".join(published["model"].unique()) if "model" in published else ""
            heading = f"published, of {models}" if models else "published"
            print(f"{heading}:\n{published.to_string(index=False)}")


def figure_of_means(
    frame: pd.DataFrame,
    note: RunNote,
    fit: tuple[float, float] | None = None,
    log: bool = False,
) -> Figure:
    """A panel for each value of `note.panel`, in it a line for each value of `note.by`; see `write` for
    `fit` and `log`."""
    panels = list(frame[note.panel].unique())
    figure = Figure(figsize=(max(12, 3 * len(panels)), 4))
    if note.small:
        figure.suptitle(note.small, fontsize=8, wrap=True, y=1.04)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (panel, label), part in frame.groupby([note.panel, note.by], sort=False):
        # Names stay in the order of the rows.
        means = part.groupby(note.x, sort=is_numeric_dtype(part[note.x]))[note.y].mean()
        ax = axes[panels.index(panel)]
        ax.plot(list(means.index), means, marker=".", label=label)
        heading = f"{note.panel} {panel}"
        ax.set_title(heading, fontsize=10)
        ax.set(xlabel=note.x, ylabel=note.y)
        if fit or log:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:g}")
            ax.set_yscale("log")
        if fit:
            fitted = means[(means > 0) & means.index.to_series().between(*fit)]
            if len(fitted) > 1:
                slope = np.polyfit(np.log(fitted.index.to_numpy()), np.log(fitted), 1)[0]
                print(f"{heading}, {note.by} {label}: {note.y} as {note.x}^{slope:.3f}")
    for ax in axes:
        ax.label_outer()
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    return figure


def started(main: Any) -> None:
    """Run a script with the command line's arguments; what it refuses is one line on standard error,
    and the exit status 2."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        complain(str(error))
        sys.exit(2)
