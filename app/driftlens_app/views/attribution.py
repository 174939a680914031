"""Attribution: which layers the final drift comes from, and what that costs in loss and margin."""

from __future__ import annotations

from driftlens_app.pages import Page
from driftlens_app.parts import show_parts
from driftlens_app.selection import selection
from driftlens_app.show import page_title
from driftlens_app.trouble import shown_errors

PAGE = Page("Attribution", icon=":material/account_tree:", order=40, section="Analysis")

_PARTS = {
    "Contributions": ("contributions", "contributions-heatmap"),
    "Two exact splits": ("splits",),
    "Loss and margin": ("adjoint",),
}


def show() -> None:
    """Draw the page."""
    chosen = selection()
    page_title(
        "Attribution",
        "Every layer's local mismatch, carried through the layers above it: what the final drift is made of.",
    )
    with shown_errors():
        show_parts(_PARTS, chosen.run, chosen.options(), key="causes")


if __name__ == "__main__":
    show()
