"""Architectures as chains of layers, and the heads that score their features."""
