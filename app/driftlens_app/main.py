"""The script that Streamlit runs for every view: navigation, sidebar, and the page that was chosen."""

from __future__ import annotations

import streamlit as st

from driftlens_app.job_panel import show_welcome_page
from driftlens_app.selection import current_selection, require_readable_runs, restore_selection, select_run
from driftlens_app.settings import Settings
from driftlens_app.show import is_dark, pages, show_errors_in_place, show_page_title, watch_theme

# By default Streamlit fetches the icon of the browser tab from an external server.
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" fill="none" stroke-width="6" stroke-linecap="round">'
    '<rect width="64" height="64" rx="14" fill="#0072B2"/>'
    '<path d="M12 46 Q34 46 52 16" stroke="#FFFFFF"/><path d="M12 46 Q34 46 52 38" stroke="#E69F00"/></svg>'
)
_WORDMARK = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 48">{icon}<text x="60" y="34" font-family="sans-serif" '
    # Every machine has another font of this family.
    'font-size="29" font-weight="600" textLength="136" lengthAdjust="spacingAndGlyphs" fill="{ink}">'
    "DriftLens</text></svg>"
)
# Hides Streamlit's animation, since pages show their own progress; raises the contrast of selected chips; reduces
# margins, which push the verdict off the first screen and columns out of tables.
_STYLE = (
    '[data-testid="stStatusWidget"] {display: none} [data-testid="stBaseButton-pillsActive"] {color: inherit} '
    '[data-testid="stMainBlockContainer"] {padding-top: 3.75rem} '
    '@media (min-width: 1000px) {[data-testid="stMainBlockContainer"] {padding-inline: 2.5rem}} '
    ".st-key-verdict p:not(:last-child) {margin-bottom: 0.35rem}"
)
_ABOUT = (
    "**DriftLens** measures, explains and repairs the feature drift of merged neural networks. "
    "All data come from run directories on this machine."
)


def main() -> None:
    """Show the dashboard page that the URL names, with navigation and sidebar."""
    # Streamlit shows its menu, which has the theme, only if the app adds an entry.
    st.set_page_config(page_title="DriftLens", page_icon=_ICON, layout="wide", menu_items={"About": _ABOUT})
    st.logo(
        _WORDMARK.format(
            icon=_ICON.replace("<svg", '<svg width="48" height="48"', 1),
            ink="#F2F2F2" if is_dark() else "#161616",
        ),
        size="large",
        icon_image=_ICON,
    )
    st.html(f"<style>{_STYLE}</style>")
    listed = pages()
    entries = {
        path: st.Page(path, title=page.title, icon=page.icon, visibility="visible" if page.is_listed else "hidden")
        for path, page in listed.items()
    }
    chosen = st.navigation([*entries.values()], expanded=True)
    path = next(path for path, entry in entries.items() if entry == chosen)
    settings = Settings.from_environment()
    run, is_readable = None, False
    with show_errors_in_place():
        run = select_run(settings)
        if run is not None:
            restore_selection(run)
            st.set_page_config(page_title=f"{current_selection().name} - {listed[path].title} - DriftLens")
        is_readable = True
    with st.sidebar:
        watch_theme()
    with show_errors_in_place():
        page = listed[path]
        if not page.needs_run or run is not None:
            if page.says:
                show_page_title(page.title, page.says)
            chosen.run()
        elif is_readable:
            require_readable_runs(settings)
            show_welcome_page()


main()
