"""A merge method and a chart for DriftLens, apart because charts are drawn where torch is not imported."""
