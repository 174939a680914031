"""Integrations with other tools; each module needs the library that it is named after."""
