"""Calibrated models: planned, solved, saved and measured."""
