"""Tracing of any module as stem, blocks and head: hooks, side inputs, sites."""
