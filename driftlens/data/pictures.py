"""Images as data sources hand them over: PIL images, or arrays of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from driftlens.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    Picture: TypeAlias = Image | np.ndarray[Any, np.dtype[np.uint8]]
else:
    Picture: TypeAlias = Any

BYTES_REMEDY = "Store values 0 to 255 as uint8; values in [0, 1] become (255 * x).round().astype('uint8')."


def check_pixels(shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> None:
    """Refuse what is not one grey [h, w] or one colour [h, w, 3] image of bytes.

    Args:
        shape: shape of one image.
        dtype: its kind of number.
        where: what messages call it: file and array.

    Raises:
        DataError: another shape or kind of number; the hint says how to convert it.
    """
    if dtype != np.uint8:
        raise DataError(f"{where}: pixels are {dtype}, expected uint8", hint=BYTES_REMEDY)
    if len(shape) == 2 or (len(shape) == 3 and shape[2] == 3):
        if min(shape) == 0:
            raise DataError(
                f"{where}: images of shape {list(shape)} are empty", hint="Leave empty images out."
            )
        return
    hint = "Grey images are [h, w]; drop further channels."
    if len(shape) == 3 and shape[0] == 3:
        hint = "Channels come last: x.transpose(1, 2, 0) for one image, x.transpose(0, 2, 3, 1) for many."
    raise DataError(f"{where}: images have shape {list(shape)}, expected [h, w, 3] or [h, w]", hint=hint)


def as_picture(value: Any, where: str) -> Picture:
    """`value` itself, if it is a PIL image or a uint8 array.

    Raises:
        DataError: it is something else.
    """
    from PIL import Image

    if isinstance(value, Image.Image):
        return value
    if isinstance(value, np.ndarray):
        check_pixels(value.shape, value.dtype, where)
        return value
    raise DataError(
        f"{where}: expected a PIL image or a uint8 array, got {type(value).__name__}", hint=BYTES_REMEDY
    )
