"""Drift, its causes and accuracy of every variant, measured phase by phase into a run."""
