"""Benchmarks of speed, memory and repairs. `python -m benchmarks` runs those that need no further data."""
