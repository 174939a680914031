"""The notebooks of the docs: executed from top to bottom, and kept with what came out, pictures made small.

    python -m tests.notebooks [NAME ...]

They are executed in one folder, in their order: the first one makes the run that the others open.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
ORDER = ("first-run", "own-modules", "mergers-and-repairs", "paper-figures")
WIDEST = 1100
_MACHINE = re.compile(r"/[^\s'\"]*/(driftlens-demo|exhibits)")


def executed(name: str, place: Path, timeout: int = 600) -> dict[str, Any]:
    """A notebook with its outputs, executed with `place` as the working directory.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; it says which, and how.
    """
    import nbclient
    import nbformat

    found = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    # Progress is for people who wait: nobody reads it on a page.
    client = nbclient.NotebookClient(
        found, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(place)}}
    )
    client.execute(env={**os.environ, "TQDM_DISABLE": "1"})
    notebook: dict[str, Any] = json.loads(nbformat.writes(found))
    return notebook


def tidied(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook without times, progress and places of this machine, with pictures as small as a page shows them."""
    notebook["metadata"] = {"kernelspec": notebook["metadata"]["kernelspec"]}
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        cell["outputs"] = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
        if cell["cell_type"] != "code":
            del cell["outputs"]
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if len(data) > 1:
                data.pop("text/plain", None)
            if "image/png" in data:
                data["image/png"] = _smaller(data["image/png"])
            if "text" in output:
                output["text"] = [_MACHINE.sub(r"\1", line).replace("\r", "") for line in output["text"]]
    return notebook


def _smaller(encoded: str) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(encoded))) as picture:
        picture = picture.convert("RGB")
        picture.thumbnail((WIDEST, 10 * WIDEST))
        written = io.BytesIO()
        picture.quantize(64).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def main(*names: str) -> None:
    """Execute notebooks and write them back with their outputs."""
    with tempfile.TemporaryDirectory() as place:
        for name in ORDER:
            if name in names or not names or name == ORDER[0]:
                notebook = tidied(executed(name, Path(place)))
                text = json.dumps(notebook, indent=1, ensure_ascii=False)
                (FOLDER / f"{name}.ipynb").write_text(f"{text}\n", encoding="utf-8")
                print(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
