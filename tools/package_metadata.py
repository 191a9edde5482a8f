"""Make package metadata that contains the address of the project; pyproject.toml states it once.

scikit-build-core calls `dynamic_metadata` for each build.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def make_urls(address: str) -> dict[str, str]:
    """Return the links of the package from the address of its GitHub repository."""
    owner, name = address.removeprefix("https://github.com/").split("/")
    return {
        "Homepage": address,
        "Documentation": f"https://{owner}.github.io/{name}",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def make_links_absolute(page: str, address: str) -> str:
    """Make links within the repository absolute: an index shows the page alone."""
    owner_and_name = address.removeprefix("https://github.com/")
    raw = f"https://raw.githubusercontent.com/{owner_and_name}/main/"
    page = re.sub(r"!\[([^]]*)\]\((?!https?:|#)([^)]+)\)", rf"![\1]({raw}\2)", page)
    return re.sub(
        r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)]+)\)", rf"[\1]({address}/blob/main/\2)", page
    )


def dynamic_metadata(settings: Mapping[str, str], project: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `urls` and `readme`. The working directory is the root of the project."""
    address = settings["address"]
    readme = Path("README.md").read_text(encoding="utf-8")
    return {
        "urls": make_urls(address),
        "readme": {
            "content-type": "text/markdown",
            "text": make_links_absolute(readme, address),
        },
    }
