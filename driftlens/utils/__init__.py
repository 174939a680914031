"""Shared utilities: errors, registries, settings, variant names, files, progress, devices, processes."""
