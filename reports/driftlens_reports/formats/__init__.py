"""The formats of a report, one file each: from its content to bytes."""
