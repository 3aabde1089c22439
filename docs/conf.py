"""Sphinx configuration. scripts/docs.sh builds the site."""

import re
import sys
from pathlib import Path

# The pages describe this checkout, even if another gbmoe is installed.
sys.path.insert(0, str(Path(__file__).parent.parent))

from gbmoe import __version__

project = "gbmoe"
author = "the authors of gbmoe"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# Names of other projects, which a build without network cannot look up.
nitpick_ignore_regex = [("py:.*", r"(torch|collections|os|pathlib|typing)\..*"), ("py:.*", r"(optional|callable|Tensor|Any)")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
default_role = "code"
# Types of arguments are in the signature; docstrings have shapes and meaning.
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_preprocess_types = False

html_theme = "furo"
html_title = f"gbmoe {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["fit.css"]
html_theme_options = {"navigation_with_keys": True}


def _keep_layout(app, what, name, obj, options, lines):
    """Show an indented block after an empty line of a docstring, such as a formula or a table, as it is: docstrings are plain text."""
    for i in range(len(lines) - 1, 0, -1):
        starts = lines[i].startswith("    ") and not lines[i - 1].strip()
        above = next((line for line in lines[i - 1::-1] if line.strip()), "")
        if starts and not above.startswith((" ", "- ")) and not above.rstrip().endswith("::"):
            lines[i:i] = ["::", ""]


def _hide_private_parameters(app, what, name, obj, options, signature, returns):
    """Leave fields that begin with an underscore out of signatures, because they are not for callers."""
    return signature and re.sub(r", _\w+: [^,()]*(?= *[,)])", "", signature), returns


def setup(app):
    """Connect the two functions; the first one before napoleon, which would turn indented blocks into fields."""
    app.connect("autodoc-process-docstring", _keep_layout, priority=400)
    app.connect("autodoc-process-signature", _hide_private_parameters)
