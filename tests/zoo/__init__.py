"""Every tiny model that tests use, made once: hand-made chains, libraries' own families, towers, worlds on disk."""
