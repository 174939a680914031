"""The room of data sources as a whole."""

from __future__ import annotations

import subprocess
import sys


def test_listing_the_sources_imports_no_heavy_library() -> None:
    script = (
        "import sys; from driftlens.data.sources import data_sources; list(data_sources); "
        "import driftlens.data.task_data; "
        "print(*{'torch', 'datasets', 'PIL', 'torchvision', 'pydantic', 'pandas'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
