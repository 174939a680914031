"""What a camera makes of a scene: light, contrast, blur and grain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from driftlens.suites.drawing.canvas import SIZE, Pixels


@dataclass(frozen=True)
class Camera:
    """How light becomes pixels.

    Attributes:
        light: smallest and largest brightness, relative to the scene.
        contrast: smallest and largest contrast, relative to the scene.
        blur: largest radius, in final pixels.
        noise: smallest and largest standard deviation of the grain, of 255.
    """

    light: tuple[float, float]
    contrast: tuple[float, float]
    blur: float
    noise: tuple[float, float]

    def shot(self, scene: Image.Image, rng: np.random.Generator) -> Pixels:
        """A photograph [SIZE, SIZE, 3] of `scene`, which is an RGB picture with a multiple of its side."""
        picture = scene.reduce(scene.width // SIZE) if scene.width != SIZE else scene
        radius = rng.uniform(0, self.blur)
        if radius > 0.3:  # less than that changes nothing that can be seen
            picture = picture.filter(ImageFilter.GaussianBlur(radius))
        light = np.asarray(picture, dtype=np.float32)
        middle = light.mean(axis=(0, 1))
        light = (middle + (light - middle) * rng.uniform(*self.contrast)) * rng.uniform(*self.light)
        grain = rng.standard_normal(light.shape, dtype=np.float32) * rng.uniform(*self.noise)
        pixels: Pixels = (light + grain).clip(0, 255).astype(np.uint8)
        return pixels


CAMERA = Camera(light=(0.85, 1.15), contrast=(0.85, 1.1), blur=0.5, noise=(1.0, 5.0))
"""The one all pictures are taken with."""
