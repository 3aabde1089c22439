"""Pictures that a page shows are kept in the repository, so that their bytes count."""

from __future__ import annotations

import pytest

from benchmarks.result_files.small_svg import small_svg

PICTURE = """<?xml version="1.0" encoding="utf-8" standalone="no"?>
<svg xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10.123456 7">
 <defs><style>*{stroke-linecap: butt}</style><path id="used" d="M 0 0
L 0 -3.5
" style="stroke: #000000; stroke-width: 0.8"/></defs>
 <g id="figure_1"><g clip-path="url(#clip)">
  <use xlink:href="#used" x="5.1299" y="1e-05" style="stroke: #000000; stroke-width: 0.8"/>
  <text style="fill: red" transform="rotate(-0 5 5)">1.23456; a: b</text></g></g>
 <defs><clipPath id="clip"><rect/></clipPath></defs>
</svg>"""


def test_a_smaller_picture_has_the_same_marks_words_and_references():
    assert small_svg(PICTURE) == (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 10.12 7"><defs>'
        '<style>*{stroke-linecap: butt}.s1{stroke:#000000;stroke-width:0.8}</style><path id="used" d="M 0 0 L 0 -3.5" class="s1" />'
        '</defs><g clip-path="url(#clip)"><use xlink:href="#used" x="5.13" y="1e-05" class="s1" />'
        '<text style="fill:red">1.23456; a: b</text></g><defs><clipPath id="clip"><rect /></clipPath></defs></svg>\n')


def test_a_heat_map_of_many_cells_stays_small(tmp_path):
    """One of 42 cells took 30,000 bytes."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    from benchmarks.result_files.pictures import draw
    from gbmoe.testing import moe_shapes
    from tests.cli.bench.rows import content, layer_row

    rows = [layer_row(case, f"gbmoe-{i}", 1e-3, speedup=1.0) for case in moe_shapes.SMOKE_CASES for i in range(10)]
    (picture,) = draw(content("smoke", rows), tmp_path, ["smoke-forward-speedup.svg"])
    assert picture.stat().st_size < 1500 + 120 * len(rows)
