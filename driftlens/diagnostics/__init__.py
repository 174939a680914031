"""From layer views to columns: one file per family of quantities."""
