"""Hooks of mkdocs: pages that live outside docs/ become pages of the site, and links between both work in both places.

In the repository, README files and pages link to each other by path, which GitHub follows. The site has only docs/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = {"migration.md": "migration/README.md"}
"""Page of the site to the file of the repository that it shows."""


_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=(?:<autoref[^>]*>)?<code>)")
_MODULE = re.compile(r"<code>~(?:\w+\.)+")


def on_page_content(html: str, **_: Any) -> str:
    """The page as the site shows it: docstrings say ``:meth:`` where a name is meant, which Markdown does not know.

    Args:
        html: What Markdown made of it.
        **_: What else mkdocs hands over.
    """
    return _MODULE.sub("<code>", _ROLE.sub("", html))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page as the site has it.

    Args:
        markdown: What the file in docs/ says.
        page: The page, as mkdocs has it.
        **_: What else mkdocs hands over.
    """
    name: str = page.file.src_uri
    home = "../" * name.count("/")
    if name in PAGES:
        markdown = (DOCS.parent / PAGES[name]).read_text(encoding="utf-8")
    for shown, path in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(path)}", f"]({home}{shown}", markdown)
    return re.sub(r"\]\((?:\.\./)+docs/", f"]({home}", markdown)
