"""Bytes on disk and named tensors: weight files of every kind, adapters, alignment."""
