"""Attribution: which layers the final drift comes from, and what that costs in loss and margin."""

from __future__ import annotations

from driftlens_app.live import offer_attribution
from driftlens_app.pages import Page
from driftlens_app.selection import selection
from driftlens_app.show import show_parts

PAGE = Page(
    "Attribution",
    icon=":material/account_tree:",
    order=40,
    section="Analysis",
    says="Every layer's local mismatch, carried through the layers above it: what the final drift is made of.",
)


def show() -> None:
    """Draw the page."""
    chosen = selection()
    offer_attribution(chosen.run)
    show_parts("attribution", chosen.run, chosen.options(), key="causes")


if __name__ == "__main__":
    show()
