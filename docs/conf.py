"""Sphinx configuration. scripts/docs.sh builds the site."""

import re
import sys
from pathlib import Path

# The checkout that these pages are of, whatever is installed beside it.
sys.path.insert(0, str(Path(__file__).parent.parent))

from gbmoe import __version__

project = "gbmoe"
author = "the authors of gbmoe"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# Names of other projects, whose pages a build without network cannot look up.
nitpick_ignore_regex = [("py:.*", r"(torch|collections|os|pathlib|typing)\..*"), ("py:.*", r"(optional|callable|Tensor|Any)")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
default_role = "code"
# An argument's type stands in the signature; docstrings here say shapes and meaning.
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_preprocess_types = False

html_theme = "furo"
html_title = f"gbmoe {release}"
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def _keep_layout(app, what, name, obj, options, lines):
    """Docstrings are plain text: what stands indented behind an empty line, a formula or a table, is shown as it is."""
    for i in range(len(lines) - 1, 0, -1):
        starts = lines[i].startswith("    ") and not lines[i - 1].strip()
        above = next((line for line in lines[i - 1::-1] if line.strip()), "")
        if starts and not above.startswith((" ", "- ")) and not above.rstrip().endswith("::"):
            lines[i:i] = ["::", ""]


def _hide_private_parameters(app, what, name, obj, options, signature, returns):
    """Fields that begin with an underscore are not for callers."""
    return signature and re.sub(r", _\w+: [^,()]*(?= *[,)])", "", signature), returns


def setup(app):
    """Connect the two, the first ahead of napoleon, which makes fields of what is indented."""
    app.connect("autodoc-process-docstring", _keep_layout, priority=400)
    app.connect("autodoc-process-signature", _hide_private_parameters)
