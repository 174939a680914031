"""Batches with images for the tiny vision-language models, without a processor."""

from __future__ import annotations

from typing import Any

import torch

from driftlens.models.texts import stack_samples
from tests.zoo.vlms import IMAGE_TOKEN as IMAGE


def batch_of(name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two questions about an image each, of different lengths and, where a family takes them, of different sizes."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    counts, images = [1, 1], [dict[str, Any](), dict[str, Any]()]
    if name.startswith("Qwen"):
        sizes = [(4, 4), (8, 4)]
        counts = [rows * columns // 4 for rows, columns in sizes]
        images = [
            {
                "pixel_values": noise(rows * columns, 2 * 3 * 16),
                "image_grid_thw": torch.tensor([[1, rows, columns]]),
            }
            for rows, columns in sizes
        ]
    elif name == "Mistral 3":
        sizes = [(16, 8), (16, 16)]
        counts = [rows * columns // 64 for rows, columns in sizes]
        images = [
            {"pixel_values": noise(1, 3, rows, columns), "image_sizes": torch.tensor([[rows, columns]])}
            for rows, columns in sizes
        ]
    elif name.startswith("Gemma 4"):
        sizes = [(4, 4), (2, 4)]
        counts = [rows * columns // 4 for rows, columns in sizes]
        images = [dict[str, Any](), dict[str, Any]()]
        for image, (rows, columns) in zip(images, sizes, strict=True):
            grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
            places = torch.full((1, 16, 2), -1)
            places[0, : len(grid)] = grid
            image |= {"pixel_values": noise(1, 16, 3 * 4), "image_position_ids": places}
    elif name in ("SmolVLM", "Idefics 3"):
        counts = [1, 2]
        images = [
            {
                "pixel_values": noise(1, tiles, 3, 8, 8),
                "pixel_attention_mask": torch.ones(1, tiles, 8, 8, dtype=torch.long),
            }
            for tiles in counts
        ]
    else:
        counts = [1, 1] if name in ("InternVL 3", "Gemma 3n with images") else [4, 4]
        images = [{"pixel_values": noise(1, 3, 8, 8)} for _ in counts]
    rows = [[2, 5, *[IMAGE] * counts[0], 6, 7, 8, 9], [2, *[IMAGE] * counts[1], 9, 4]]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    beside = {"mm_token_type_ids": (ids == IMAGE).long()} if name.startswith(("Qwen", "Gemma 4")) else {}
    beside |= {"token_type_ids": (ids == IMAGE).long()} if name.startswith("Gemma 3") else {}
    return {"input_ids": ids, "attention_mask": mask, **beside, **stack_samples(images)}
