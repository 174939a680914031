"""Tensors in, tensors out: no modules, no files, no device chosen for the caller."""
