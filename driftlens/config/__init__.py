"""The run spec (one YAML file with models, data and measurements) and the requests of commands."""
