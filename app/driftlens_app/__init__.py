"""The dashboard: looks at saved runs, and starts the command line as a process of its own. It never imports torch.

`main.py` is the script that Streamlit runs, `server.py` serves it, `settings.py` says how. Everything a page shows
comes from a run's tables (`driftlens.runs`), its charts (`driftlens_reports.charts`) and its texts
(`driftlens_reports`).

**Adding a page means adding one file** to `views/`, for example `views/bounds.py`:

    from driftlens_app.show import Page
    from driftlens_app.selection import TASK, selection
    from driftlens_app.show import show_chart

    PAGE = Page("Bounds", icon=":material/functions:", order=70, says="How far scores ...")

    def show() -> None:
        chosen = selection(TASK)
        show_chart("bound", chosen.run, chosen.options())

    if __name__ == "__main__":
        show()

Streamlit executes the file as `__main__` whenever the page is drawn; the navigation imports it to read `PAGE`. Unless
`PAGE` says `needs_run=False`, the page runs only with a readable run, chosen in the sidebar that the shell draws; of
task, variants, layer and measure of drift (all of it in the URL) `selection` draws those that the page names. The title
is the shell's too, and so are errors: raise `DriftLensError`, and the page says what happened and what to do, so
docstrings here say what is refused, not which errors are passed on. `with shown_errors():` keeps one part's error from
taking the rest along. A job that a page starts needs a function in `requests.py` and no more. Which charts a page
shows, charts say themselves: `show_part` asks their registry. A file without `PAGE` is a part of another page.
"""
