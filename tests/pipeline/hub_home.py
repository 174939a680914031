"""The command line with the Hub's cache below HF_HOME, also where libraries were imported under another one."""

from __future__ import annotations

import importlib

import datasets.config
import huggingface_hub.constants
import pytest

from driftlens.cli import main
from tests.pipeline.fixtures import rehearse_briefly

if __name__ == "__main__":
    for module in (huggingface_hub.constants, datasets.config):
        importlib.reload(module)
    rehearse_briefly(pytest.MonkeyPatch())
    main()
