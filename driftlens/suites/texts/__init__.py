"""The written tasks, one per file; the registry imports them all."""
