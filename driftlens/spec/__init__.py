"""The run spec: one YAML file that says which models, which data and what to measure.

    spec = load_spec("run.yaml", overrides=["data.defaults.n=64"])
    spec.experts["cars"].weights

Values are checked, paths absolute and defaults filled in; every error is a `SpecError`.
"""

from driftlens.spec.run import RunSpec, json_schema, load_spec

__all__ = ["RunSpec", "json_schema", "load_spec"]
