"""What each method kept of one prompt: a strip per method and layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvbench.errors import UserError, is_integer, is_number, printable
from kvbench.report.experiment import BASELINE, Group
from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.style import style_of
from kvbench.report.figures.vector import add_spot

_MOST_PIECES, _MOST_LAYERS, _LARGEST = 64, 4, 1e6
"""Pieces of the prompt and layers that a figure shows."""
_ANSWER = "#F3D04E"
_PIECE = 28
"""Characters of a piece's text that the page says."""


@dataclass(frozen=True)
class Strip:
    """What one method kept of a prompt.

    Attributes:
        tokens: of the prompt. width: of a piece of it.
        layers: by number, the weight held per token of each piece; 1 everywhere is the exact cache.
        texts: of the pieces, as far as they are known.
        answer: from which token to before which the answer stands, None where that is not known.
        unplaced: share of the entries that are no single token's.
    """

    tokens: int
    width: int
    layers: Mapping[int, NDArray[np.float64]]
    texts: Sequence[str] = ()
    answer: tuple[int, int] | None = None
    unplaced: float = 0.0

    @property
    def mean(self) -> NDArray[np.float64]:
        """Of all layers, by piece."""
        return np.mean(list(self.layers.values()), axis=0)

    @property
    def of_answer(self) -> float | None:
        """Weight held per token of the pieces that the answer stands in, mean over layers."""
        if self.answer is None:
            return None
        pieces = slice(self.answer[0] // self.width, -(-self.answer[1] // self.width))
        return float(self.mean[pieces].mean())

    def coarser(self, pieces: int) -> Strip:
        """Of so many pieces at most."""
        count = -(-self.tokens // self.width)
        by = -(-count // pieces)
        if by == 1:
            return self
        sizes = np.full(count, float(self.width))
        sizes[-1] = self.tokens - self.width * (count - 1)
        starts = list(range(0, count, by))
        layers = {
            layer: np.add.reduceat(held * sizes, starts) / np.add.reduceat(sizes, starts)
            for layer, held in self.layers.items()
        }
        texts = ["".join(self.texts[at : at + by]) for at in starts]
        return Strip(self.tokens, self.width * by, layers, texts, self.answer, self.unplaced)


def strip_of(value: object) -> Strip | None:
    """What a record says under ``kept`` (see `kvbench.engine.kept.strips_of`); None where it says
    nothing, or what no kvbench wrote."""
    if not isinstance(value, Mapping):
        return None
    tokens, width, layers = value.get("tokens"), value.get("width"), value.get("layers")
    if not (
        is_integer(tokens, 1, 1e9) and is_integer(width, 1, 1e9) and isinstance(layers, Mapping)
    ):
        return None
    assert isinstance(tokens, int)
    assert isinstance(width, int)
    count = -(-tokens // width)
    found = {}
    for name, held in layers.items():
        sound = isinstance(held, list) and len(held) == count <= 1024
        sound = sound and str(name).isdecimal() and len(str(name)) <= 4
        if not sound or not all(is_number(one) and 0 <= one <= _LARGEST for one in held):
            return None
        found[int(name)] = np.array(held, dtype=float) / 100
    if not found:
        return None
    texts, answer, unplaced = (value.get(name) for name in ("texts", "answer", "unplaced"))
    known = (
        isinstance(texts, list) and len(texts) == count and all(isinstance(t, str) for t in texts)
    )
    place = isinstance(answer, list) and len(answer) == 2 and all(is_integer(a, 0) for a in answer)
    within = place and 0 <= answer[0] < answer[1] <= tokens  # type: ignore[index]
    return Strip(
        tokens,
        width,
        found,
        [printable(re.sub(r"\s", " ", text)) for text in texts] if known else (),  # type: ignore[union-attr]
        (answer[0], answer[1]) if within else None,  # type: ignore[index]
        float(unplaced) if is_number(unplaced) and 0 <= unplaced <= 1 else 0.0,  # type: ignore[operator,arg-type]
    )


def kept_figures(group: Group) -> list[Drawn]:
    """What each method kept of one example, the latest of those that most methods say it of; none where
    no record says it."""
    if "kept" not in group.records:
        return []
    records = group.records[group.records["kept"].notna()]
    examples: dict[tuple[Any, Any], dict[str, Strip]] = {}
    columns = records[["seed", "example_id", "variant", "kept"]]
    for seed, example, variant, kept in columns.itertuples(index=False):
        strip = strip_of(kept)
        if strip is not None:
            examples.setdefault((seed, example), {})[str(variant)] = strip
    if not examples:
        return []
    most = max(map(len, examples.values()))
    (_, example), strips = [item for item in examples.items() if len(item[1]) == most][-1]
    shown = [v for v in group.variants if v.label in strips and v.method != BASELINE]
    drawn = []
    for suffix, page in names.pages(group, shown):
        named = {variant.label: (variant.method, strips[variant.label]) for variant in page}
        if not named:
            continue
        figure = draw_strips(named)
        unplaced = [label for label, (_, strip) in named.items() if strip.unplaced]
        caption = (
            f"Example {example}. From left to right the prompt's tokens; height: the weight that a "
            "layer's cache holds of each piece, per token and mean over KV heads (full height is the "
            "number beside the name; the exact cache holds 1 everywhere)."
        )
        if any(strip.answer for _, strip in named.values()):
            caption += " Marked: where the answer stands."
        if unplaced:
            caption += f" Not shown: entries that are no single token's, of {', '.join(unplaced)}."
        drawn.append(
            Drawn(
                f"kept-{names.stem(group)}{names.slug(suffix) and '-' + names.slug(suffix)}",
                f"What each method kept: {group.task} on {group.model}",
                caption,
                figure,
                _finding(named),
            )
        )
    return drawn


def draw_kept(*frames: pd.DataFrame) -> Figure:
    """A strip per layer of what each frame of `kvbench.kept` holds: the tokens from left to right, the
    weight held of them as height.

    Raises:
        UserError: no frame, or one that `kvbench.kept` did not make.
    """
    named: dict[str, tuple[str, Strip]] = {}
    for frame in frames:
        words, method = frame.attrs.get("words"), frame.attrs.get("method")
        if not words or not method:
            raise UserError("a frame does not say its prompt; allowed: what kvbench.kept returned")
        layers = {}
        for layer in frame["layer"].unique():
            here = frame[frame["layer"] == layer]
            held = np.zeros(len(words))
            placed = here[here["position"] >= 0]
            np.add.at(held, placed["position"].to_numpy(), placed["weight"].to_numpy())
            layers[int(layer)] = held / here["head"].nunique()
        label = method if method not in named else f"{method} {len(named) + 1}"
        named[label] = (method, Strip(len(words), 1, layers, words))
    if not named:
        raise UserError("no frames; allowed: one or more of kvbench.kept")
    return draw_strips(named)


def draw_strips(named: Mapping[str, tuple[str, Strip]]) -> Figure:
    """One row of strips per label, each with its method's colour; the layers from top to bottom."""
    layers = max(min(_MOST_LAYERS, len(strip.layers)) for _, strip in named.values())
    size = (7.4, 0.34 + 0.17 * layers)
    figure, axes = canvas.new_panels(len(named), 1, size, (0.0, 0.55), sharex=True)
    for ax, (label, (method, strip)) in zip(axes, named.items(), strict=True):
        _draw(ax, label, method, strip.coarser(_MOST_PIECES))
    axes[-1].set_xlabel("token of the prompt", fontsize=canvas.TEXT)
    return figure


def _draw(ax: Axes, label: str, method: str, strip: Strip) -> None:
    step = max(1.0, len(strip.layers) / _MOST_LAYERS)
    every = sorted(strip.layers)
    shown = [every[int(i * step)] for i in range(min(len(every), _MOST_LAYERS))]
    top = max(1.0, *(float(strip.layers[layer].max()) for layer in shown))
    count = len(strip.layers[shown[0]])
    edges = np.minimum(np.arange(count + 1) * strip.width, strip.tokens)
    for row, layer in enumerate(shown):
        ax.stairs(
            strip.layers[layer] / top * 0.86 - row,
            edges,
            baseline=-row,
            fill=True,
            color=style_of(method).color,
            linewidth=0,
        )
    if strip.answer is not None:
        ax.axvspan(*strip.answer, facecolor=_ANSWER, alpha=0.55, linewidth=0, zorder=0)
    canvas.style_axes(ax)
    ax.grid(visible=False)
    ax.set_xlim(0, strip.tokens)
    ax.set_ylim(1 - len(shown), 1)
    ax.set_yticks([0.43 - row for row in range(len(shown))], [f"layer {one}" for one in shown])
    ax.tick_params(axis="y", length=0, labelsize=canvas.SMALL - 1.5)
    ax.set_title(f"{label}   ×{top:.1f}", fontsize=canvas.TEXT, loc="left", pad=2, color="black")
    ax.spines["bottom"].set_color(canvas.GREY)
    for place, held in enumerate(strip.mean):
        first, last = int(edges[place]), int(edges[place + 1]) - 1
        text = strip.texts[place] if strip.texts else ""
        said = f" “{' '.join(text.split())[:_PIECE]}”" if text.strip() else ""
        answer = strip.answer
        inside = answer is not None and answer[0] <= last and first < answer[1]
        centre = (first + last + 1) / 2, 1 - len(shown) / 2
        size = float(last + 1 - first), float(len(shown))
        where = f"tokens {first}–{last}{said}{', the answer' if inside else ''}"
        add_spot(ax, *centre, f"{label}: {where}: ×{held:.2f}", size)


def _finding(named: Mapping[str, tuple[str, Strip]]) -> str:
    """How much of the answer each method holds, as its text alternative."""
    held = {label: strip.of_answer for label, (_, strip) in named.items()}
    known = {label: share for label, share in held.items() if share is not None}
    if not known:
        return ""
    texts = [f"{label} {known[label]:.2f}" for label in sorted(known, key=lambda one: -known[one])]
    return f"Weight held per token where the answer stands, mean over layers: {', '.join(texts)}."
