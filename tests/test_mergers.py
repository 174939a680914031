"""The page of merge methods in `docs/` says what their registry says."""

from __future__ import annotations

from driftlens.merging.method import merge_methods
from tests.mergers import FILE, page


def test_the_page_in_docs_is_what_the_registry_says() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text == page(), "run: python -m tests.mergers > docs/mergers.md"
    assert all(f"| `{name}` |" in text for name in merge_methods)
