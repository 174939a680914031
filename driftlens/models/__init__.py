"""Checkpoints, architectures and what comes with them: one adapter file per family."""
