"""Pages of the dashboard, one file each; see the package's docstring for what such a file holds."""
