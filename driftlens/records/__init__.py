"""The run directory: what its tables hold, how it is written, and how it is read without torch."""
