"""Fixtures of this folder."""

from tests.pipelines.fixtures import light, world

__all__ = ["light", "world"]
