"""The run spec (one YAML file with models, data and measurements) and the requests of commands.

    spec = load_spec("run.yaml", overrides=["data.defaults.n=64"])
    spec.experts["cars"].weights

Values are checked, paths absolute and defaults filled in; every error is a `SpecError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driftlens.config.run import RunSpec, json_schema, load_spec

__all__ = ["RunSpec", "json_schema", "load_spec"]


def __getattr__(name: str) -> Any:
    # A command line that only needs its flags does not build the models of a whole spec.
    if name not in __all__:
        raise AttributeError(f"module 'driftlens.config' has no attribute {name!r}")
    from driftlens.config import run

    return getattr(run, name)
