"""Known suites of models and tasks; the embedded one is built on the spot."""
