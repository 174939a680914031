"""Files of sounds: waveforms, or features that were made of them."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from driftlens.base.errors import DataError
from driftlens.base.files import plain_file
from driftlens.data.sources import PATHS_HINT, refused
from driftlens.models.language.sounds import Sound

_WIDTHS = {1: "u1", 2: "<i2", 4: "<i4"}
"""Types of the numbers in WAV files by their bytes."""

_MOST = 1 << 27
"""Numbers of one sound; two hours at sixteen thousand a second."""


def read_sound(file: Path) -> Sound:
    """The sound in a `.npy` or `.wav` file; channels become their mean, whole numbers lie within -1 and 1.

    Raises:
        DataError: it is no such file, or holds neither a waveform [t] nor features [bands, frames].
    """
    hint = "Expected a .npy of a waveform [t] or of features [bands, frames], or a .wav with plain samples (PCM)."
    with refused(f"{file}: can't be read", PATHS_HINT, OSError):
        plain_file(file)
    with refused(f"{file}: no sound", hint, ValueError, EOFError, wave.Error, KeyError):
        values, rate = _wav(file) if file.suffix.lower() == ".wav" else (_npy(file), None)
    if not values.size or values.ndim not in (1, 2) or not np.isfinite(values).all():
        raise DataError(f"{file}: numbers of shape {list(values.shape)}, empty or not finite", hint=hint)
    return Sound(values, rate)


def _npy(file: Path) -> np.ndarray:
    # Mapped, a header that promises more than the file holds allocates nothing.
    values = np.load(file, mmap_mode="r", allow_pickle=False)
    if values.size > _MOST:
        raise ValueError(f"it holds {values.size:,} numbers; at most {_MOST:,} are read")
    return _as_floats(values)


def _wav(file: Path) -> tuple[np.ndarray, int]:
    with wave.open(str(file), "rb") as sound:
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
