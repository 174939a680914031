"""Data sources and samples: one file per kind of source, sampling, class names, data in memory."""
