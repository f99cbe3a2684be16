"""How the documentation is built: `make docs`, or `make links` to try its links to other sites as well.

The source directory is the repository's root, so that a page's links are the same in a repository browser and in the built site.
"""

from importlib.metadata import version as installed_version

project = "spu_llm"
version = release = installed_version("spu_llm")
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "experiments/README.md"]
exclude_patterns = [".*", "configs", "experiments/*/**", "requirements", "results", "spu_llm", "tests"]  # no need to look there
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]

myst_heading_anchors = 4  # links to headings as repository browsers have them
smartquotes = False  # -- begins an option
autodoc_typehints = "none"  # JAX's and NumPy's types are no pages of ours, to which a link could lead

html_theme = "furo"
html_title = "spu_llm"
html_copy_source = False
html_show_copyright = False

linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1)"]
linkcheck_timeout = 20
linkcheck_retries = 2
