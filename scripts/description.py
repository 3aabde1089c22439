"""The package's description: README.md as it is shown where no repository is around it, such as on a package index.

Links to files of the repository would be dead there. Where REPOSITORY is known they become absolute, otherwise plain text. setup.py runs
this file; standard library only.
"""

from __future__ import annotations

import re
from pathlib import Path

# The address of the repository's pages once it has one, without a slash at its end: "https://github.com/OWNER/gbmoe".
REPOSITORY = ""
# Code comes first, because brackets in it are no link. Then a link, whose text may hold code, or a picture.
_CODE_OR_LINK = re.compile(r"(?P<code>^```.*?^```|`[^`\n]+`)|(?P<picture>!?)\[(?P<text>(?:`[^`\n]*`|[^\[\]])*)\]\((?P<target>[^()\s]+)\)",
                           re.MULTILINE | re.DOTALL)


def description(readme: str, version: str, repository: str = REPOSITORY) -> str:
    """The text of README.md without links that lead nowhere: those to files of the repository are absolute, to the files of `version`;
    without a `repository` they are plain text, and a picture is the sentence that describes it."""
    def absolute(match: re.Match) -> str:
        picture, text, target = match["picture"], match["text"], match["target"]
        if match["code"] or re.match(r"\w+:", target):
            return match[0]
        if target.startswith("#"):  # a heading; what shows the page may name it differently
            return text
        if repository:
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/v{version}/{target})"
        return f"*In the repository, a picture: {text}.*" if picture else text
    return _CODE_OR_LINK.sub(absolute, readme)


def of_checkout(root: Path) -> str:
    """The description of the package in the folder `root`. Raises ValueError where gbmoe/_version.py has no version."""
    version = re.search(r'^__version__ = "([^"+]+)', (root / "gbmoe" / "_version.py").read_text(encoding="utf-8"), re.MULTILINE)
    if version is None:
        raise ValueError(f"expected __version__ in {root / 'gbmoe' / '_version.py'}")
    return description((root / "README.md").read_text(encoding="utf-8"), version[1])
