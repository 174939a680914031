"""The forward order: models side by side, layer by layer."""
