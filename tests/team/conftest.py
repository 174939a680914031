"""Fixtures of this folder."""

from tests.pipeline.fixtures import light, world

__all__ = ["light", "world"]
