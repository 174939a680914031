"""Library modules built without memory for their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from driftlens.errors import IncompatibleModelsError


def weightless(build: Callable[[], nn.Module], source: str) -> Any:
    """The module that `build` returns, parameters on meta, buffers real, in eval mode and without gradients.

    Args:
        build: constructs the library's module from a configuration.
        source: where the configuration came from, for the message.

    Raises:
        IncompatibleModelsError: the library can't build what the configuration describes.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            module = build()
    except Exception as error:  # whatever a constructor makes of values in somebody's file
        raise IncompatibleModelsError(
            f"the model that {source} describes can't be built: {type(error).__name__}: {error}",
            hint="Check its configuration file, and that the library is recent enough for it.",
        ) from error
    return module.eval().requires_grad_(False)
