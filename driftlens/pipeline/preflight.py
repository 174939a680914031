"""Preflight: what can be told before anything large is read."""
