"""The run spec: one YAML file that says which models, which data and what to measure.

    spec = load_spec("run.yaml", overrides=["data.defaults.n=64"])
    spec.experts["cars"].weights

Values are checked, paths absolute and defaults filled in; every error is a `SpecError`.
"""

from driftlens.spec.data import (
    DataDefaults,
    HfData,
    ImageFolderData,
    JsonlData,
    NpzArrays,
    NpzData,
    PythonData,
    TaskData,
)
from driftlens.spec.run import RunSpec, json_schema, load_spec
from driftlens.spec.sections import Calibration, FileHead, TextHead

__all__ = [
    "Calibration",
    "DataDefaults",
    "FileHead",
    "HfData",
    "ImageFolderData",
    "JsonlData",
    "NpzArrays",
    "NpzData",
    "PythonData",
    "RunSpec",
    "TaskData",
    "TextHead",
    "json_schema",
    "load_spec",
]
