"""Data sources and samples: sources by kind, sampling, class names, altered samples, data in memory."""
