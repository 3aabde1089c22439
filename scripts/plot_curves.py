"""Draws the curves of a CSV file as an SVG: the first column is the axis from left to right, every other one a curve.

    python scripts/plot_curves.py results/h200/float8-training.csv results/h200/pictures/float8-training.svg \
        --y "held-out nats a byte" --top 1.5

Lines that begin with # are left out. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_files.pictures import COLOURS, METADATA, STYLE
from benchmarks.result_files.small_svg import small_svg


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, help="the CSV file")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--y", default="", help="what the curves are")
    parser.add_argument("--top", type=float, help="where the axis from bottom to top ends")
    arguments = parser.parse_args()
    lines = [line for line in arguments.table.read_text().splitlines() if not line.startswith("#")]
    names, *rows = csv.reader(lines)
    with rc_context(STYLE):
        figure = Figure((4.4, 3), layout="constrained")
        axes = figure.subplots()
        x, *curves = zip(*([float(value) for value in row] for row in rows))
        for i, (name, curve) in enumerate(zip(names[1:], curves)):
            axes.plot(x, curve, color=COLOURS[i], linestyle=("-", "--", ":", "-.")[i % 4], label=name)
        axes.set(xlabel=names[0], ylabel=arguments.y)
        axes.set_ylim(top=arguments.top)
        axes.grid(linewidth=0.3)
        axes.legend(frameon=False)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata=METADATA["svg"])
    arguments.picture.write_text(small_svg(picture.getvalue()))


if __name__ == "__main__":
    main()
