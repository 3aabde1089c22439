"""scripts/check_page_widths.py on pages that are too wide: each of them passed a build of the site.

    pytest tests/test_check_page_widths.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import check_page_widths

LINE = "x = " + "1 + " * 100


@pytest.fixture
def site(tmp_path) -> Path:
    """A page that fits, and five that do not."""
    bodies = {"fits": "<p>short</p><pre style='overflow-x: auto'>x = 1</pre>",
              "page": f"<p style='white-space: pre'>{LINE}</p>",
              "code": f"<pre style='overflow-x: auto'>{LINE}</pre>",
              "table": f"<div style='overflow-x: auto'><table><tr><td style='white-space: pre'>{LINE}</td></tr></table></div>",
              "picture": "<img src='no.svg' alt='no'>",
              "shrunk": "<img src='wide.svg' alt='wide' style='max-width: 100%'>"}
    (tmp_path / "wide.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' width='940' height='9'/>")  # token.svg was on a phone
    for name, body in bodies.items():
        (tmp_path / f"{name}.html").write_text(f"<!doctype html><meta charset=utf-8><body><article>{body}</article>")
    return tmp_path


@pytest.mark.slow
def test_a_line_that_is_cut_at_the_columns_edge_is_named(site, capsys):
    """31 of 45 code blocks were."""
    pytest.importorskip("playwright")
    try:
        check_page_widths.chromium()
    except check_page_widths.NothingToLookWith as reason:
        pytest.skip(str(reason))
    assert check_page_widths.main([str(site)]) == 1
    *found, last = capsys.readouterr().out.splitlines()
    where = {tuple(line.split(" (")[0].split(".html, ")) for line in found}
    assert where == {("page", "phone"), ("page", "tablet"), ("page", "desktop"), ("code", "desktop"), ("table", "desktop"),
                     ("picture", "phone"), ("picture", "tablet"), ("picture", "desktop"), ("shrunk", "phone")}
    assert all("<p> \"x = 1 + 1" in line for line in found if line.startswith("page")) and last == "9 faults of form"


def test_without_chromium_or_pages_the_status_is_not_that_of_pages_that_fit(site, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check_page_widths, "PROGRAMS", ("no-such-program",))
    monkeypatch.delenv("CI", raising=False)
    pytest.importorskip("playwright")
    assert check_page_widths.main([str(site)]) == 2
    assert check_page_widths.main([str(tmp_path / "nothing")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "apt-get install chromium" in first and "scripts/docs.sh" in second
