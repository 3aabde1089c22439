"""Opens every page of the built site in headless Chromium at three widths, and names what does not fit: page, width and element.

    scripts/check_page_widths.py [docs/_build/html]

No page may be wider than the window, at any width. On a desktop no code block and no table may be wider than the column either: a line
that is cut at the column's edge is not read. On a tablet or a phone they scroll inside themselves, because a wrapped line of code or
of a table reads as two. Pictures must load, and are shrunk to 70 % at most, as smaller letters cannot be read.

It needs `pip install -e .[pages]` and a Chromium of the system's; in CI, as root on Debian, it installs Debian's. Exit status: 0 where
everything fits, 1 where something does not, 2 where nothing was looked at.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# Width and height of the window in CSS pixels, and whether code and tables may scroll inside themselves.
WINDOWS = {"phone": (390, 844, True), "tablet": (820, 1180, True), "desktop": (1440, 900, False)}
# A sentence for each fault of the page as it is laid out now. If the page is too wide, the innermost elements that reach outside are
# named, without those that an element around them clips or scrolls.
FAULTS = """mayScroll => {
  const root = document.documentElement, faults = [], elements = [...document.querySelectorAll("body *")];
  const scrolls = element => getComputedStyle(element).overflowX !== "visible";
  const named = element => {
    const lines = (element.innerText || element.alt || element.className || "").split("\\n");
    return `<${element.tagName.toLowerCase()}> "${lines.reduce((a, b) => a.length < b.length ? b : a).trim().slice(0, 60)}"`;
  };
  if (root.scrollWidth > root.clientWidth) {
    const cut = element => element !== document.body && (scrolls(element) || cut(element.parentElement));
    const right = e => {  // of the element, or of text that sticks out of it
      const box = e.getBoundingClientRect();
      return box.left + Math.max(box.width, scrolls(e) ? 0 : e.scrollWidth);
    };
    const outside = elements.filter(e => right(e) > root.clientWidth + 1 && !cut(e.parentElement));
    const innermost = outside.filter(e => !outside.some(other => other !== e && e.contains(other)));
    faults.push(`the page is ${root.scrollWidth} px wide: ${innermost.slice(0, 3).map(named).join(", ")}`);
  }
  if (!mayScroll)
    for (const e of document.querySelectorAll("article *"))
      if (e.scrollWidth > e.clientWidth + 1 && scrolls(e))
        faults.push(`${named(e)} is ${e.scrollWidth} px wide, its column ${e.clientWidth}`);
  for (const e of document.images)
    if (!e.naturalWidth || e.clientWidth && e.clientWidth < 0.7 * e.naturalWidth)
      faults.push(`picture ${e.getAttribute("src")}: ${e.clientWidth} of its ${e.naturalWidth} px wide`);
  return faults;
}"""


class NothingToLookWith(Exception):
    """Chromium, playwright or the site is missing; the text says what to do."""


def chromium() -> str:
    """The path of Chromium. Raises NothingToLookWith."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None and os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]):
            subprocess.run(["apt-get", "-qq", *command], check=True, env=environment, stdout=sys.stderr)
        found = shutil.which("chromium")
    if found is None:
        raise NothingToLookWith("no page was looked at: expected Chromium on PATH (Debian: apt-get install chromium)")
    return found


def faults(site: Path) -> list[str]:
    """Everything that does not fit in the HTML pages of a folder, a line each. Raises NothingToLookWith."""
    pages = sorted(site.rglob("*.html"))
    if not pages:
        raise NothingToLookWith(f"{site}: expected a folder of HTML pages, which scripts/docs.sh makes")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NothingToLookWith("no page was looked at: expected playwright (pip install -e '.[pages]')") from None
    found = []
    with sync_playwright() as playwright:
        # The sandbox does not start as root, nor in most containers. The pages are this checkout's own.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        for page in pages:
            tab.goto(page.resolve().as_uri(), wait_until="load")
            for name, (width, height, may_scroll) in WINDOWS.items():
                tab.set_viewport_size({"width": width, "height": height})
                found += [f"{page.relative_to(site)}, {name} ({width} px): {fault}" for fault in tab.evaluate(FAULTS, may_scroll)]
        browser.close()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", nargs="?", type=Path, default=ROOT / "docs" / "_build" / "html", help="the folder of HTML pages")
    try:
        found = faults(parser.parse_args(arguments).site)
    except NothingToLookWith as reason:
        print(f"check_page_widths.py: {reason}", file=sys.stderr)
        return 2
    print(*found, f"{len(found)} faults of form", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
