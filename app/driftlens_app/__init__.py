"""Streamlit dashboard: shows saved runs and starts CLI commands as processes. It never imports torch.

Streamlit runs `main.py`; `server.py` serves it; `settings.py` configures it. Pages show a run's tables
(`driftlens.runs`), charts (`driftlens_reports.charts`) and texts (`driftlens_reports`).

**Adding a page means adding one file** to `views/`, for example `views/bounds.py`:

    from driftlens_app.show import Page
    from driftlens_app.selection import TASK, current_selection
    from driftlens_app.show import show_chart

    PAGE = Page("Bounds", icon=":material/functions:", order=70, says="Bounds on how far scores ...")

    def show() -> None:
        chosen = current_selection(TASK)
        show_chart("bound", chosen.run, chosen.options())

    if __name__ == "__main__":
        show()

Streamlit executes the file as `__main__` to show the page; the navigation imports it to read `PAGE`. Unless `PAGE` has
`needs_run=False`, the page needs a readable run, which the sidebar selects. `current_selection` shows the named
controls; all of them are in the URL. Raise `DriftLensError` for errors; `show_errors_in_place` keeps the rest of a
page. A job needs a function in `requests.py`. A file without `PAGE` is part of another page.
"""
