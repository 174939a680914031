"""What everybody may import: errors, registries, settings, names of variants, files, progress, processes."""
