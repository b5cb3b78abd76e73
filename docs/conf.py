"""The documentation site: `make docs` builds it from these pages and from docstrings, without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "dsq_ckpt"
author = "dsq_ckpt authors"
copyright = author
version_file = (ROOT / "dsq_ckpt" / "version.py").read_text(encoding="utf-8")
release = version = re.findall(r'__version__ = "(.+)"', version_file)[0]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"  # its styles and scripts are in its package, and its fonts are the reader's own
html_title = f"dsq_ckpt {release}"
html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

default_role = "code"  # docstrings are written with single backticks, as Markdown is
autodoc_mock_imports = ["transformers", "accelerate"]  # which the site can be built without
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"


PAGES = {"CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changes", "SECURITY.md": "security", "README.md": "index"}
"""Files beside `docs/`, and the pages that the site has of them."""


def links_of_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fill pages of files beside `docs/`, and let all links lead to pages or files.

    Directories, and pages that the site does not have, are named instead.
    """
    docs = ROOT / "docs"
    folder = own = (docs / docname).parent
    for name, page in PAGES.items():
        if page == docname != "index":
            app.env.note_dependency(str(ROOT / name))
            source[0], folder = (ROOT / name).read_text(encoding="utf-8"), ROOT

    def link(found: re.Match[str]) -> str:
        path = (folder / found[2]).resolve()
        if path.is_dir():
            return f"`{path.relative_to(ROOT)}/`"
        if path.suffix == ".md" and path.parent != ROOT and docs not in path.parents:
            return f"{found[1]} (`{path.relative_to(ROOT)}`)"
        if path.parent == ROOT and path.name in PAGES:
            path = docs / f"{PAGES[path.name]}.md"
        return f"[{found[1]}]({os.path.relpath(path, own)}{found[3] or ''})"

    source[0] = re.sub(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)", link, source[0])


def indented_is_code(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Mark indented blocks after a blank line as code: docstrings have them without reStructuredText's two colons."""
    marked: list[str] = []
    section = False
    for line in lines:
        section = section or bool(re.fullmatch(r"[A-Z]\w+:", line))
        begins = line.startswith("    ") and len(marked) > 1 and not marked[-1] and not marked[-2].startswith(" ")
        if begins and not section:
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def write_command_line(app: Sphinx) -> None:
    """Write the page of the command line's options, as typer tells them."""
    page = Path(app.srcdir, "cli_options.md")
    arguments = ["dsq_ckpt.cli", "utils", "docs", "--name", "dsq", "--title", "Options of dsq", "--output", str(page)]
    subprocess.run([sys.executable, "-m", "typer", *arguments], check=True, capture_output=True, cwd=ROOT)


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("builder-inited", write_command_line)
    app.connect("source-read", links_of_the_site)
    app.connect("autodoc-process-docstring", indented_is_code, priority=100)  # before napoleon
