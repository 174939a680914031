"""Small pictures of samples, as far as the run has them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import streamlit as st

from driftlens.records.run import DriftRun
from driftlens.records.thumbs import read_thumbs, thumbs_file
from driftlens_app.inside import require_inside


def pictures(run: DriftRun, task: str, sample_ids: Sequence[str]) -> list[str | None]:
    """A picture of each sample as a `data:` address; None where the run has none.

    Raises:
        RunError: the file of pictures is damaged, or a link that leaves the root.
    """
    file = run.path / thumbs_file(task)
    require_inside(file)
    changed = file.stat().st_mtime_ns if file.is_file() else 0
    return _pictures(str(run.path), task, changed, tuple(sample_ids), run)


@st.cache_data(max_entries=64, show_spinner=False)
def _pictures(
    folder: str, task: str, changed: int, sample_ids: tuple[str, ...], _run: DriftRun
) -> list[str | None]:
    stored = read_thumbs(_run, task)
    if stored is None:
        return [None] * len(sample_ids)
    places = {sample: at for at, sample in enumerate(_run.sample_ids(task)[: len(stored)])}
    return [_address(stored[places[sample]]) if sample in places else None for sample in sample_ids]


def _address(pixels: object) -> str:
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(pixels).save(target, format="PNG")  # type: ignore[arg-type]
    return f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"
