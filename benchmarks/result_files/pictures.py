"""Pictures of the rows of a result file: bars for each shape, a heat map of speed-ups, curves of the scaling suite, memory.

The same rows give the same bytes. The colours are Okabe and Ito's, which colour-blind readers can tell apart; hatches and markers
distinguish the same things without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure  # and not pyplot, which needs a backend for the whole process and keeps its figures

from benchmarks.result_files.reading import without_cap
from gbmoe._atomic_files import appears_complete
from gbmoe.cli.bench.measurements.measurement import MOVING
from gbmoe.cli.bench.result_file import is_disturbed, timing_of
from gbmoe.cli.bench.running.verify_and_time import BURSTS
from gbmoe.cli.bench.table import by_kind, measured
from gbmoe.testing.moe_shapes import SCALING_CASES

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999")
_HATCHES = ("", "//", "..", "xx")
_MARKERS = "osD^vP*X"
_STYLE = {"svg.hashsalt": "gbmoe", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False,
          "axes.spines.right": False, "figure.dpi": 150, "savefig.bbox": "tight", "hatch.linewidth": 0.4}
# Fields that SVG and PNG files would otherwise fill with the time and versions.
_METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def draw(content: dict, folder: Path, only: Collection[str] | None = None) -> list[Path]:
    """Draw every picture for which there are enough rows, as SUITE-NAME.png and .svg; with `only`, the files of these names alone."""
    written = []
    with rc_context(_STYLE):
        for name, figure in _figures(content):
            for extension, metadata in _METADATA.items():
                path = folder / f"{content['suite']}-{name}.{extension}"
                if only is None or path.name in only:
                    with appears_complete(path, replaces=True) as partial_path:
                        figure.savefig(partial_path, format=extension, metadata=metadata)
                    written.append(path)
    return written


def _figures(content: dict) -> Iterator[tuple[str, Figure]]:
    kinds = by_kind(without_cap(measured(content)))
    for kind, rows in kinds.items():
        prefix = f"{kind}-" if len(kinds) > 1 else ""
        rate = "terabytes" if kind in MOVING else "tflops"
        for computation in dict.fromkeys(row["computation"] for row in rows):
            same = [row for row in rows if row["computation"] == computation]
            timed = [row for row in same if row.get("median")]
            label = prefix + computation.replace(", ", "-").replace(" ", "-").replace("+", "-and-").replace("_", "-")
            if any(row.get(rate) for row in timed):
                yield f"{label}-speed", _speed_bars(content, same, rate)
            if any(row.get("extra_peak_bytes") for row in timed):
                yield f"{label}-memory", _memory_bars(content, same)
            compared = [row for row in timed if row.get("speedup") is not None]
            if len(compared) > 1:
                yield f"{label}-speedup", _heat_map(content, compared)
            if content["suite"] == "scaling" and timed:
                yield f"{label}-growth", _growth(content, timed)


# ---------------------------------------------------------------------------------------------------------------- looks


def _looks(content: dict) -> dict[str, dict]:
    """A colour and a hatch for each implementation that has a row, the same in all pictures of a file."""
    names = dict.fromkeys(row["by"] for row in content["rows"])
    return {name: {"color": _COLOURS[i % len(_COLOURS)], "hatch": _HATCHES[i // len(_COLOURS) % len(_HATCHES)]}
            for i, name in enumerate(names)}


def _panel(row: dict) -> str:
    """The title of a panel of bars, or of a column of a heat map."""
    align = f", align {row['align']}" if row.get("align") else ""
    routing = "" if row["routing"] in ("none", "random") else f", {row['routing']}"
    return f"{row['case']}{routing}{align}"


def _panels(rows: Sequence[dict]) -> dict[str, list[dict]]:
    panels: dict[str, list[dict]] = {}
    for row in rows:
        panels.setdefault(_panel(row), []).append(row)
    return panels


def _title(content: dict, rows: Sequence[dict], what: str) -> str:
    machines = dict.fromkeys(run["machine"]["name"] for run in content["runs"])
    where = ", ".join(machines).replace("$", r"\$")  # between two of them it would be a formula
    timing = "" if timing_of(rows[0]) == BURSTS else f", {timing_of(rows[0])}"
    return f"{content['suite']}: {rows[0]['computation']}, {what}\n{where}, {rows[0]['dtype']}{timing}"


# ----------------------------------------------------------------------------------------------------------------- bars


def _speed_bars(content: dict, rows: Sequence[dict], rate: str) -> Figure:
    name = {"tflops": "TFLOP/s", "terabytes": "TB/s"}[rate]

    def limit(row):
        return row[rate] / row["of_limit"] if row.get("of_limit") else None

    what = f"{name} (more is better; the line is the limit)"
    return _bars(content, rows, lambda row: row.get(rate), name, what, limit)


def _memory_bars(content: dict, rows: Sequence[dict]) -> Figure:
    def gib(row):
        return None if row.get("extra_peak_bytes") is None else row["extra_peak_bytes"] / 2**30

    return _bars(content, rows, gib, "GiB", "extra peak memory in GiB (less is better)")


def _bars(content: dict, rows: Sequence[dict], value: Callable, axis: str, what: str,
          limit: Callable[[dict], float | None] = lambda row: None) -> Figure:
    """A panel of horizontal bars for each shape and routing; where a value is missing, the reason stands in the bar's place."""
    panels, looks = _panels(rows), _looks(content)
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    most = max(len(panel) for panel in panels.values())
    size = 3.6 * columns + 1.2, lines * (0.19 * max(most, 3) + 0.9) + 0.6
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axes_of_panel, (title, panel) in zip(axes.flat, panels.items()):
        for place, row in enumerate(panel):
            bar = axes_of_panel.barh(place, value(row) or 0, height=0.75, edgecolor="black", linewidth=0.3,
                                     **looks[row["by"]])
            said = row["outcome"] if value(row) is None else f"{value(row):.3g}"
            axes_of_panel.bar_label(bar, [said], padding=2, fontsize=6)
        limits = [found for found in map(limit, panel) if found]
        if limits:
            axes_of_panel.axvline(max(limits), color="black", linestyle="--", linewidth=0.8)
        axes_of_panel.set_yticks(range(len(panel)), [row["by"] for row in panel], fontsize=7)
        axes_of_panel.invert_yaxis()
        axes_of_panel.margins(x=0.15)
        axes_of_panel.set_title(title, fontsize=8)
        axes_of_panel.set_xlabel(axis)
    for unused in axes.flat[len(panels):]:
        unused.set_axis_off()
    figure.suptitle(_title(content, rows, what))
    return figure


# ------------------------------------------------------------------------------------------------------------- heat map


def _heat_map(content: dict, rows: Sequence[dict]) -> Figure:
    """Speed-ups: a line for each implementation, a column for each shape and routing; blue is faster than the baseline, orange
    slower. What was disturbed, or is compared with a disturbed baseline, has a question mark."""
    columns, names = list(_panels(rows)), list(dict.fromkeys(row["by"] for row in rows))
    cells = {(row["by"], _panel(row)): row["speedup"] for row in rows}
    disturbed = {(row["by"], _panel(row)) for row in rows if is_disturbed(row)}
    grid = [[math.log2(cells.get((name, column), math.nan)) for column in columns] for name in names]
    reach = max(1.0, max(abs(cell) for line in grid for cell in line if not math.isnan(cell)))
    labels = 0.05 * max(map(len, columns))  # inches of height that the longest label takes, rotated
    figure = Figure((1.8 + 0.55 * len(columns), 0.9 + labels + 0.28 * len(names)), layout="constrained")
    axes = figure.subplots()
    colours = LinearSegmentedColormap.from_list("speed-up", ["#D55E00", "#FFFFFF", "#0072B2"]).with_extremes(bad="#DDDDDD")
    image = axes.imshow(grid, cmap=colours, vmin=-reach, vmax=reach, aspect="auto")
    for (y, name), (x, column) in ((a, b) for a in enumerate(names) for b in enumerate(columns)):
        speedup = cells.get((name, column))
        if speedup is not None:
            dark = abs(math.log2(speedup)) > 0.6 * reach
            doubt = "?" if disturbed & {(name, column), (content["baseline"], column)} else ""
            axes.text(x, y, (f"{speedup:.2f}" if speedup < 10 else f"{speedup:.0f}") + doubt, ha="center", va="center",
                      fontsize=6, color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("times as fast")
    bar.ax.yaxis.set_major_formatter(lambda power, _: f"{2**power:.3g}")
    figure.suptitle(_title(content, rows, f"times as fast as {content['baseline']} (grey: no time; ?: disturbed)"))
    return figure


# --------------------------------------------------------------------------------------------------------------- curves


def _growth(content: dict, rows: Sequence[dict]) -> Figure:
    """Time over each swept size, with the least time that the limits allow."""
    looks, by_case = _looks(content), dict[str, dict[str, dict]]()
    for row in rows:
        by_case.setdefault(row["case"].removesuffix("-small"), {})[row["by"]] = row
    sweeps = len(SCALING_CASES)
    figure = Figure((3.4 * sweeps, 3.6), layout="constrained")
    axes = figure.subplots(1, sweeps, sharey=True)
    names = list(dict.fromkeys(row["by"] for row in rows))
    for axes_of_sweep, (size, sweep) in zip(axes, SCALING_CASES.items()):
        points = [by_case[case.name] for case in sweep if case.name in by_case]
        for i, name in enumerate(names):
            curve = [(found[name][size], found[name]["median"] * 1e3) for found in points if name in found]
            style = {"color": looks[name]["color"], "marker": _MARKERS[i % len(_MARKERS)], "markersize": 4,
                     "linestyle": "-" if i < len(_COLOURS) else "--", "linewidth": 1.2}
            if curve:
                axes_of_sweep.plot(*zip(*curve), label=name, **style)
        any_row = [next(iter(found.values())) for found in points]
        least = [(row[size], row["median"] * row["of_limit"] * 1e3) for row in any_row if row.get("of_limit")]
        if least:
            axes_of_sweep.plot(*zip(*least), color="black", linestyle=":", linewidth=1.2, label="limit")
        axes_of_sweep.set_xscale("log", base=2)
        axes_of_sweep.set_yscale("log")
        axes_of_sweep.set_xlabel({"hidden": "hidden size"}.get(size, size))
        axes_of_sweep.xaxis.set_major_formatter(lambda power, _: f"{power:.0f}")
        axes_of_sweep.grid(which="major", linewidth=0.3)
    axes[0].set_ylabel("median time in ms")
    handles = {label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=7, frameon=False)
    figure.suptitle(_title(content, rows, "time as one size grows"))
    return figure
