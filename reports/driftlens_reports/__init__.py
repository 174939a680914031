"""A saved run read out: in words for the terminal, as a page for the browser. Never imports torch."""
