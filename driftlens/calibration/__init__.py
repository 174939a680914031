"""Calibrators: one file each, settings in the constructor and closed forms of moments; none ever holds a model."""
