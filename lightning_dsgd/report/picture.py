"""A plan as a picture; the only place of the simulator that needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_dsgd.errors import ConfigurationError
from lightning_dsgd.simulate.planning import Option

Measure = Callable[[Option], float]
_COLOURS = (
    *("#1f77b4", "#0b2e59", "#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#7f7f7f", "#e377c2"),
    *("#8c564b", "#bcbd22", "#17becf"),
)
"""In the order in which a plan lists its strategies, and then from the first again."""
_PANELS: tuple[tuple[str, Measure], ...] = (
    ("seconds per update", lambda option: option.result.seconds_per_update),
    ("gradients used per second", lambda option: option.result.gradients_per_second),
    ("mean staleness (updates)", lambda option: option.result.mean_staleness),
)


def draw_plan(options: Sequence[Option], best: Option, file: Path) -> None:
    """One row per worker count, one column per figure, K on the horizontal axis."""
    pyplot = load_pyplot()
    counts = sorted({option.candidate.workers for option in options})
    panels = list(_PANELS)
    if any(option.seconds_to_target is not None for option in options):
        panels.append(
            ("seconds to the target, if ever", lambda option: option.seconds_to_target or 0.0)
        )
    size = (3.6 * len(panels), 3.1 * len(counts) + 0.9)
    figure, axes = pyplot.subplots(len(counts), len(panels), figsize=size, squeeze=False)
    for row, count in zip(axes, counts, strict=True):
        chosen = [option for option in options if option.candidate.workers == count]
        for axis, (title, measure) in zip(row, panels, strict=True):
            _panel(axis, chosen, best, measure)
            axis.set_title(f"{title}, P = {count}", fontsize=9)
    _legend(figure, axes)
    save(figure, file)
    pyplot.close(figure)


def _panel(axis: Any, options: Sequence[Option], best: Option, measure: Measure) -> None:
    """Lines over K; a strategy without K, or with one value, is a dashed line across."""
    for place, name in enumerate(dict.fromkeys(option.candidate.strategy for option in options)):
        points = [
            (option.candidate.k, measure(option))
            for option in options
            if option.candidate.strategy == name and math.isfinite(measure(option))
        ]
        colour = _COLOURS[place % len(_COLOURS)]
        # K-sync, the first, lies below K-batch-sync where no worker gives two gradients
        style = {"color": colour, "label": name, "linewidth": 1.3 if place else 3.5}
        if len(points) > 1:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, **style)
        elif points:
            axis.axhline(points[0][1], linestyle="--", **style)
    _mark(axis, options, best, measure)
    ks = [option.candidate.k or 1 for option in options]
    axis.set_xlim(0.5, max(ks) + 0.5)
    axis.locator_params(axis="x", integer=True)
    axis.set_xlabel("K", fontsize=8)
    axis.set_ylim(bottom=-0.04 * axis.get_ylim()[1])
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)


def _mark(axis: Any, options: Sequence[Option], best: Option, measure: Measure) -> None:
    if best in options and math.isfinite(measure(best)):
        k = best.candidate.k or best.candidate.workers / 2
        axis.plot([k], [measure(best)], marker="*", markersize=13, color="black", zorder=5,
                  linestyle="none", label="recommended")  # fmt: skip


def _legend(figure: Any, axes: Any) -> None:
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncol=5, fontsize=8)
    height = figure.get_size_inches()[1]
    figure.tight_layout(rect=(0.0, 0.65 / height, 1.0, 1.0))


def load_pyplot() -> Any:
    """matplotlib without a display, or how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError(
            "pictures need matplotlib: pip install 'lightning-dsgd[plots]', or leave --plot out"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, file: Path) -> None:
    """Write the picture; its format follows the file's name."""
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot write the picture {file}: {error}") from None
