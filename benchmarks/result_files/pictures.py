"""Pictures of the rows of a result file: bars for each shape, a heat map of speed-ups, where time and energy go, curves of the scaling
suite, memory.

The same rows give the same bytes. The colours are Okabe and Ito's, which colour-blind readers can tell apart; hatches and markers
distinguish the same things without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure  # and not pyplot, which needs a backend for the whole process and keeps its figures

from benchmarks.result_files.reading import without_cap
from benchmarks.result_files.small_svg import small_svg
from gbmoe._atomic_files import appears_complete
from gbmoe.cli.bench.measurements.measurement import MOVING
from gbmoe.cli.bench.result_file import is_disturbed, timing_of
from gbmoe.cli.bench.running.verify_and_time import BURSTS
from gbmoe.cli.bench.table import by_kind, measured
from gbmoe.testing.moe_shapes import SCALING_CASES

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999")
_HATCHES = ("", "//", "..", "xx")
_MARKERS = "osD^vP*X"
STYLE = {"svg.hashsalt": "gbmoe", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 8, "axes.spines.top": False,
          "axes.spines.right": False, "figure.dpi": 150, "savefig.bbox": "tight", "hatch.linewidth": 0.4}
# Fields that SVG and PNG files would otherwise fill with the time and versions.
METADATA = {"svg": {"Date": None, "Creator": None, "Format": None, "Type": None}, "png": {"Software": None}}


def draw(content: dict, folder: Path, only: Collection[str] | None = None) -> list[Path]:
    """Draw every picture for which there are enough rows, as SUITE-NAME.png and .svg; with `only`, the files of these names alone."""
    written = []
    with rc_context(STYLE):
        for name, figure in _figures(content):
            for extension, metadata in METADATA.items():
                path = folder / f"{content['suite']}-{name}.{extension}"
                if only is None or path.name in only:
                    with appears_complete(path, replaces=True) as partial_path:
                        figure.savefig(partial_path, format=extension, metadata=metadata)
                        if extension == "svg":
                            partial_path.write_text(small_svg(partial_path.read_text()))
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
            accounted = [(row, least) for row in timed if (least := _least(content, row)) is not None]
            if accounted:
                yield f"{label}-account", _account(content, accounted)
            if content["suite"] == "scaling" and timed:
                yield f"{label}-growth", _growth(content, timed)


# ---------------------------------------------------------------------------------------------------------------- looks


def _looks(content: dict) -> dict[str, dict]:
    """A colour and a hatch for each implementation that has a row, the same in all pictures of a file."""
    names = dict.fromkeys(row["by"] for row in content["rows"])
    return {name: {"color": COLOURS[i % len(COLOURS)], "hatch": _HATCHES[i // len(COLOURS) % len(_HATCHES)]}
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
    """Speed-ups: a line for each shape and routing, a column for each implementation, so that it is as narrow as a phone; blue is faster
    than the baseline, orange slower. What was disturbed, or is compared with a disturbed baseline, has a question mark."""
    lines, names = list(_panels(rows)), list(dict.fromkeys(row["by"] for row in rows))
    cells = {(_panel(row), row["by"]): row["speedup"] for row in rows}
    disturbed = {(_panel(row), row["by"]) for row in rows if is_disturbed(row)}
    grid = [[math.log2(cells.get((line, name), math.nan)) for name in names] for line in lines]
    reach = max(1.0, max(abs(cell) for line in grid for cell in line if not math.isnan(cell)))
    width = 0.3 + 0.06 * max(map(len, lines)) + 0.6 * len(names) + 0.04 * len(names[-1])  # in inches: labels, cells, the last slanted name
    title = _title(content, rows, f"times as fast as {content['baseline']} (blue: faster, grey: no time, ?: disturbed)")
    title = "\n".join(part for line in title.split("\n") for part in wrap(line, round(15 * width)))
    slanted = 0.045 * max(map(len, names))  # inches of height
    figure = Figure((width, 0.8 + 0.15 * title.count("\n") + slanted + 0.2 * len(lines)), layout="constrained")
    axes = figure.subplots()
    colours = LinearSegmentedColormap.from_list("speed-up", ["#D55E00", "#FFFFFF", "#0072B2"]).with_extremes(bad="#DDDDDD")
    axes.imshow(grid, cmap=colours, vmin=-reach, vmax=reach, aspect="auto", interpolation="none")  # a pixel a cell in an SVG
    for (y, line), (x, name) in ((a, b) for a in enumerate(lines) for b in enumerate(names)):
        speedup = cells.get((line, name))
        if speedup is not None:
            dark = abs(math.log2(speedup)) > 0.6 * reach
            doubt = "?" if disturbed & {(line, name), (line, content["baseline"])} else ""
            axes.text(x, y, (f"{speedup:.2f}" if speedup < 10 else f"{speedup:.0f}") + doubt, ha="center", va="center",
                      color="white" if dark else "black")
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(names)), names, rotation=30, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(lines)), lines)
    axes.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=8)
    return figure


# -------------------------------------------------------------------------------------------------------------- account


def _least(content: dict, row: dict) -> tuple[float, float] | None:
    """Seconds and joules of the row's FLOPs at the rates of the dense product of the same run; None for a peer, or where one is missing."""
    run = content["runs"][row.get("run", 0)]
    dense: dict = next((found for found in run.get("limit_rows", ()) if found["by"] == "dense"), {})
    if not (row["by"] == "gbmoe-auto" and row["kind"] == "layer" and row.get("joules") and dense.get("joules")):
        return None
    part = row["flops"] / dense["flops"]
    return part * dense["median"], part * dense["joules"]


def _account(content: dict, accounted: Sequence[tuple[dict, tuple[float, float]]]) -> Figure:
    """Two bars for each shape, with its first routing, a step's time and its energy: what its products take at a dense product's rates,
    and the rest."""
    accounted = list({row["case"]: (row, least) for row, least in reversed(accounted)}.values())[::-1]
    figure = Figure((4.4, 0.9 + 0.34 * len(accounted)), layout="constrained")
    axes = figure.subplots()
    for line, (row, (seconds, joules)) in enumerate(accounted):
        bars = ((line - 0.2, seconds * 1e3, row["median"] * 1e3, "ms", COLOURS[0]), (line + 0.2, joules, row["joules"], "J", COLOURS[1]))
        for place, least, whole, unit, colour in bars:
            part = min(least / whole, 1)
            axes.barh(place, part * 100, height=0.38, color=colour, clip_on=False)
            axes.barh(place, (1 - part) * 100, left=part * 100, height=0.38, color=colour, alpha=0.35, clip_on=False)
            axes.text(part * 100 - 2, place, f"{part * 100:.0f} %", ha="right", va="center", fontsize=7,
                      color="white" if unit == "ms" else "black")
            axes.text(102, place, f"{whole:.3g} {unit}", va="center", fontsize=7)
    axes.set_yticks(range(len(accounted)), [_panel(row) for row, _ in accounted])
    axes.set_ylim(len(accounted) - 0.5, -0.5)
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 25), [f"{percent} %" for percent in range(0, 101, 25)])
    first, *rest = _title(content, [row for row, _ in accounted], "where time (blue) and energy (orange) go").split("\n")
    dark = "dark: the products at a dense product's rates, light: the rest"
    figure.suptitle("\n".join([first, dark, *rest]), fontsize=8)
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
                     "linestyle": "-" if i < len(COLOURS) else "--", "linewidth": 1.2}
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
