"""The run directory: its manifest, status, lock and tables, written, read and verified, without torch."""
