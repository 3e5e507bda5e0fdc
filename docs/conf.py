"""Sphinx reads this: `make docs` builds the pages, and warnings are errors."""

import openmm_tensornet

project = "openmm-tensornet"
author = copyright = "openmm-tensornet developers"
release = openmm_tensornet.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
myst_heading_anchors = 3
# Docstrings say types, shapes and units, and put names in single backquotes.
default_role = "literal"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# A reference to something of this package must be documented; those to others are not followed.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!openmm_tensornet).*")]
