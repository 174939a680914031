"""One file adds one thing: a toy of each kind in a module of its own is found everywhere."""
