"""Models and samples of a spec or a run, opened, compared and merged."""
