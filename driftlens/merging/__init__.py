"""Merge methods: functions of state dicts, one file each."""
