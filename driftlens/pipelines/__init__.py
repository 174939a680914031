"""The jobs of DriftLens, one module per job: analyze, calibrate, sweep, compare merges, validate."""
