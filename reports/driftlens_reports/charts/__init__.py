"""Interactive charts of a saved run: `charts` lists them. A file holds one, or a few that share their parts."""
