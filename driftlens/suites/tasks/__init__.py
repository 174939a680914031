"""The drawn tasks, one file each; a new file here is a new task of the suite."""
