"""Small pictures of the diagnosis samples, put into the run for those who look at single samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from driftlens.records.thumbs import MOST, SIDE, Pictures, save_thumbs, thumbs_file

if TYPE_CHECKING:
    from driftlens.data.pictures import Picture
    from driftlens.pipeline.study import TaskSamples
    from driftlens.records.writer import RunWriter


def store_thumbs(writer: RunWriter, task: str, samples: TaskSamples) -> None:
    """Keep small pictures of a task's diagnosis samples, in their order; none where they are no images.

    Raises:
        DataError: an image can't be read.
        RunError: the file can't be written.
    """
    if samples.picture is None or not samples.diagnosis.ids:
        return
    pictures = np.stack([thumb(samples.picture(sample)) for sample in samples.diagnosis.ids[:MOST]])
    with writer.file(thumbs_file(task)) as path:
        save_thumbs(path, pictures)


def thumb(picture: Picture) -> Pictures:
    """The picture [SIDE, SIDE, 3], whole, with grey bars where it is not square."""
    from PIL import Image, ImageOps

    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    return np.asarray(ImageOps.pad(image.convert("RGB"), (SIDE, SIDE), color=(128, 128, 128)), dtype=np.uint8)
