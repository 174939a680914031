"""The pages of the dashboard: what every file in `views/` says about itself."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from driftlens_app import views


@dataclass(frozen=True)
class Page:
    """A page, as its file declares it; the shell draws the title of one that `says` what it shows, and opens a run."""

    title: str
    icon: str
    order: int
    is_listed: bool = True
    says: str = ""
    needs_run: bool = True


@functools.cache
def pages() -> Mapping[str, Page]:
    """All pages by the path of their file, relative to the app's folder, in the order of the navigation."""
    files = {
        f"views/{module.name}.py": importlib.import_module(f"{views.__name__}.{module.name}")
        for module in pkgutil.iter_modules(views.__path__)
    }
    # A file without is a part of a page.
    declared: dict[str, Page] = {path: file.PAGE for path, file in files.items() if hasattr(file, "PAGE")}
    return dict(sorted(declared.items(), key=lambda item: item[1].order))


def path_of(view: str) -> str:
    """Where the page `view` lies, for `st.page_link` and `st.switch_page`, for example `views/overview.py`."""
    path = f"views/{view}.py"
    assert (Path(__file__).parent / path).is_file(), path
    return path
