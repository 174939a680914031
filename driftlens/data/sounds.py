"""Sounds in files and in data sets: waveforms, or features that were made of them."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from driftlens.base.errors import DataError
from driftlens.base.files import plain_file
from driftlens.data.sources import PATHS_HINT, refused
from driftlens.models.language.sounds import Sound

_WIDTHS = {1: "u1", 2: "<i2", 4: "<i4"}
"""Types of the numbers in WAV files by their bytes."""

_MOST = 1 << 27
"""Numbers of one sound; two hours at sixteen thousand a second."""


_HINT = (
    "Expected a .npy of a waveform [t] or of features [bands, frames], or a .wav with plain samples (PCM)."
)
_CELL_HINT = (
    'Expected a WAV file with plain samples (PCM), or numbers: {"array": [t], "sampling_rate": RATE}. What is packed '
    "otherwise (FLAC, MP3) is not unpacked: write it anew, as numbers, with `dataset.map`."
)


def read_sound(file: Path) -> Sound:
    """The sound in a `.npy` or `.wav` file; channels become their mean, whole numbers lie within -1 and 1.

    Raises:
        DataError: it is no such file, or holds neither a waveform [t] nor features [bands, frames].
    """
    with refused(f"{file}: can't be read", PATHS_HINT, OSError):
        plain_file(file)
    is_wav = file.suffix.lower() == ".wav"
    return _checked(lambda: _wav(str(file)) if is_wav else (_npy(file), None), str(file), _HINT)


def sound_in(cell: Any, where: str) -> Sound:
    """The sound that a cell of a data set holds: the bytes of a WAV file, or numbers, with their rate or without.

    Raises:
        DataError: it holds neither a waveform [t] nor features [bands, frames].
    """

    def read() -> tuple[np.ndarray, int | None]:
        if isinstance(cell, bytes):
            return _wav(io.BytesIO(cell))
        values, rate = (cell["array"], cell["sampling_rate"]) if isinstance(cell, Mapping) else (cell, None)
        array = np.asarray(values)
        if array.dtype.kind != "f":  # of whole ones nothing says how large they may be
            raise ValueError(f"its numbers are {array.dtype}; expected floats within -1 and 1")
        return _as_floats(array), None if rate is None else int(rate)

    return _checked(read, where, _CELL_HINT)


def _checked(read: Callable[[], tuple[np.ndarray, int | None]], where: str, hint: str) -> Sound:
    with refused(f"{where}: no sound", hint, ValueError, EOFError, wave.Error, LookupError, TypeError):
        values, rate = read()
    if not values.size or values.ndim not in (1, 2) or not np.isfinite(values).all():
        raise DataError(f"{where}: numbers of shape {list(values.shape)}, empty or not finite", hint=hint)
    return Sound(values, rate)


def _npy(file: Path) -> np.ndarray:
    # Mapped, a header that promises more than the file holds allocates nothing.
    values = np.load(file, mmap_mode="r", allow_pickle=False)
    if values.size > _MOST:
        raise ValueError(f"it holds {values.size:,} numbers; at most {_MOST:,} are read")
    return _as_floats(values)


def _wav(file: str | BinaryIO) -> tuple[np.ndarray, int]:
    with wave.open(file, "rb") as sound:
        content = sound.readframes(sound.getnframes())
        channels, rate = sound.getnchannels(), sound.getframerate()
        values = np.frombuffer(content, dtype=_WIDTHS[sound.getsampwidth()])
    return _as_floats(values).reshape(-1, channels).mean(axis=1), rate


def _as_floats(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "u" and values.dtype.itemsize == 1:  # of which 128 is silence
        return (values.astype(np.float32) - 128) / 128
    if values.dtype.kind == "i":
        return values.astype(np.float32) / -float(np.iinfo(values.dtype).min)
    if values.dtype.kind != "f":
        raise ValueError(f"its numbers are {values.dtype}")
    return np.array(values, dtype=np.float32)
