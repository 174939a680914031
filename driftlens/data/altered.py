"""Altered samples, made whenever they are read: views for calibration, and corruptions of ImageNet-C (1903.12261).

A view is a copy that expert and merged model both read, so it need not keep its original's label.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from driftlens.data.samples import SampleSet, map_tensors, seeded_rng
from driftlens.data.sources import Picture
from driftlens.utils.errors import DataError, SpecError, did_you_mean

if TYPE_CHECKING:
    from numpy.random import Generator
    from torch import Tensor

# Largest shift relative to an image's side; borders are mirrored.
_MARGIN = 3 / 32
_LIGHT = 0.2
# What the inputs of each kind of views must be.
_NEEDED = {"words": "texts", "crop": "images [n, c, h, w]", "mix": "floating-point inputs"}
# Share of a prompt's words replaced by words of other prompts.
_REPLACED = 0.3


def append_views(samples: SampleSet) -> SampleSet:
    """Append augmented copies (views) to a sample set; return it unchanged if none are requested.

    A copy depends on the seed, its original and, for some kinds, the task's other samples, but not on their order.
    """
    views = samples.views
    if views is None or not views.count:
        return samples
    original = replace(samples, views=None)
    count, dims = len(original), list[int]()
    if original.texts is None:
        map_tensors(lambda x: dims.append(x.dim()) if x.is_floating_point() else None, original.load([0]))
    # In the order of `auto`.
    fits = {"words": original.texts is not None, "crop": 4 in dims, "mix": bool(dims)}
    kind = next((name for name in fits if fits[name]), "mix") if views.kind == "auto" else views.kind
    if not fits[kind]:
        raise DataError(
            f"task {samples.task}: views of kind {kind} need {_NEEDED[kind]}",
            hint="Set another kind of views, or none.",
        )
    if kind != "crop" and count < 2:
        raise DataError(
            f"task {samples.task}: views of kind {kind} combine several samples, but it has one",
            hint="Add samples, or set views: none.",
        )
    identities, seed = original.unique_ids, views.seed

    def view_generator(place: int) -> Generator:
        return seeded_rng(seed, f"view {place // count}/{samples.task}/{identities[place % count]}")

    copies = [f"{name}, view {number}" for number in range(1, 1 + views.count) for name in original.ids]
    every = replace(original, ids=(*original.ids, *copies), labels=None, picture=None, original=original)
    if kind == "words":
        return _replace_prompt_words(every, view_generator)
    make_loader = _cropped_batch_loader if kind == "crop" else _mixed_batch_loader
    every = replace(every, load=make_loader(original, view_generator))
    # Fail now rather than during the calibration.
    every.load([count])
    return every


def _cropped_batch_loader(original: SampleSet, random: Callable[[int], Generator]) -> Callable[[Sequence[int]], Any]:
    """Return a loader of samples and crop copies: images [n, c, h, w], shifted, scaled by 1 + u, plus v."""
    import torch

    count = len(original)

    def load_cropped_batch(positions: Sequence[int]) -> Any:
        def shift_images(value: Tensor) -> Tensor:
            if value.dim() != 4 or not value.is_floating_point():
                return value
            rows = zip(positions, value, strict=True)
            return torch.stack([row if at < count else _shift_and_relight(row, random(at)) for at, row in rows])

        return map_tensors(shift_images, original.load([view % count for view in positions]))

    return load_cropped_batch


def _shift_and_relight(image: Tensor, random: Generator) -> Tensor:
    from torch.nn.functional import pad

    down, right = (min(side - 1, max(1, round(side * _MARGIN))) for side in image.shape[-2:])
    wide = pad(image[None], (right, right, down, down), mode="reflect")[0]
    top, left = (int(random.integers(2 * most + 1)) for most in (down, right))
    scale, shift = random.uniform(-_LIGHT, _LIGHT, 2).tolist()
    return wide[..., top : top + image.shape[-2], left : left + image.shape[-1]] * (1 + scale) + shift


def _mixed_batch_loader(original: SampleSet, random: Callable[[int], Generator]) -> Callable[[Sequence[int]], Any]:
    """Return a loader of samples and mixup copies: w * sample + (1 - w) * another, w in [0.5, 1]; integers stay."""
    count = len(original)
    # Partners are chosen in the order of identities, so that a copy does not depend on the samples' order.
    order = sorted(range(count), key=original.unique_ids.__getitem__)
    ranks = {position: rank for rank, position in enumerate(order)}

    def partner_and_share(place: int) -> tuple[int, float]:
        if place < count:
            return place, 1.0
        drawn = random(place)
        partner = order[(ranks[place % count] + 1 + int(drawn.integers(count - 1))) % count]
        return partner, float(drawn.uniform(0.5, 1))

    def load_mixed_batch(positions: Sequence[int]) -> Any:
        import torch

        others, shares = zip(*map(partner_and_share, positions), strict=True)
        is_copy = torch.tensor([position >= count for position in positions])

        def mix_tensors(value: Tensor, other: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            if value.shape != other.shape:
                raise DataError(
                    f"task {original.task}: samples of shapes {list(value.shape[1:])} and {list(other.shape[1:])} "
                    "can't be mixed",
                    hint="Set another kind of views, or none.",
                )
            side_by_side = (-1, *[1] * (value.dim() - 1))
            share = torch.tensor(shares, dtype=value.dtype).reshape(side_by_side)
            # Originals stay bit-identical; 1 * x + 0 * y would turn an infinite y into NaN.
            return torch.where(is_copy.reshape(side_by_side), share * value + (1 - share) * other, value)

        return map_tensors(mix_tensors, original.load([view % count for view in positions]), original.load(others))

    return load_mixed_batch


def _common_prefix(texts: Sequence[str]) -> str:
    # The extremes of the sorted texts share the least.
    lowest, highest = min(texts), max(texts)
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(lowest, highest, strict=False))
    return "".join(letter for letter, _ in alike)


def _replace_prompt_words(every: SampleSet, random: Callable[[int], Generator]) -> SampleSet:
    """Add copies of samples whose prompts have words replaced by words of the task's other prompts.

    Common beginnings and ends of all prompts, and special tokens, stay.
    """
    original, texts, read = every.original, every.texts, every.preprocess
    assert original is not None and texts is not None and read is not None
    rows = [texts.read(position) for position in range(len(original))]
    questions = [row.input for row in rows]
    special = () if texts.reader is None else texts.reader.special_tokens
    kept = re.compile("|".join([*map(re.escape, special), r"(\w+)"]))
    head = re.sub(r"\w+$", "", _common_prefix(questions))
    tail = re.sub(r"^\w+", "", _common_prefix([text[::-1] for text in questions])[::-1])
    middles = [slice(len(head), max(len(head), len(text) - len(tail))) for text in questions]
    words, ends = list[str](), dict[int, tuple[int, int]]()
    for position in sorted(range(len(questions)), key=original.unique_ids.__getitem__):
        between = [match[1] for match in kept.finditer(questions[position][middles[position]]) if match[1]]
        ends[position] = len(words), len(words) + len(between)
        words += between

    def reworded_row(place: int) -> Any:
        position, drawn = place % len(questions), random(place)
        text, middle, (start, stop) = questions[position], middles[position], ends[position]
        num_others = len(words) - (stop - start)

        def replacement_word(match: re.Match[str]) -> str:
            if not match[1] or not num_others or drawn.random() >= _REPLACED:
                return match[0]
            other = int(drawn.integers(num_others))
            return words[other if other < start else other + stop - start]

        changed = kept.sub(replacement_word, text[middle])
        return rows[position]._replace(input=text[: middle.start] + changed + text[middle.stop :])

    rows += [reworded_row(place) for place in range(len(questions), len(every))]
    # The data's answers would belong to another question, so copies show none of them; an expert whose own
    # answers are shown answers the copies anew.
    anew = len(questions) if texts.shown == "target" else 0

    @functools.cache
    def rows_with_shown_answers() -> list[Any]:
        copies = [row._replace(target="") for row in rows[anew:]]
        if texts.shown == "expert" and texts.answers is not None:
            answers = texts.answers(copies)
            copies = [row._replace(target=answer) for row, answer in zip(copies, answers, strict=True)]
        return [*rows[:anew], *copies]

    return replace(
        every,
        load=lambda positions: read([rows_with_shown_answers()[position] for position in positions]),
        texts=replace(texts, read=rows.__getitem__),
    )


# [h, w, 3], from 0 to 1.
Pixels = NDArray[np.float64]
# image, severity from 0 (slight) to 4, random generator -> corrupted image.
Change = Callable[[Pixels, int, np.random.Generator], Pixels]

CLEAN = "none"
# The severity in FeatCal's table.
SEVERITY = 3
# Side in pixels of ImageNet-C's images. Lengths scale with the shorter side, so that severities look alike at any size.
_SIDE = 224


def parse_corruption(word: str) -> tuple[str, int]:
    """Parse `fog` (severity 3), `fog:5` or `none` (0) into kind and severity."""
    kind, colon, severity = str(word).partition(":")
    if kind == CLEAN and not colon:
        return CLEAN, 0
    if kind not in CORRUPTIONS:
        raise SpecError(
            f"unknown corruption {kind!r}, expected {', '.join((CLEAN, *CORRUPTIONS))}",
            hint=did_you_mean(kind, CORRUPTIONS) or "Add a severity after a colon: fog:5.",
        )
    if colon and severity not in set("12345"):
        raise SpecError(f"corruption {word!r}: severity {severity!r}, expected 1 to 5")
    return kind, int(severity or SEVERITY)


def format_corruption(word: str) -> str:
    """Format a corruption for tables: `none`, or the kind with its severity, such as `fog:3`."""
    kind, severity = parse_corruption(word)
    return f"{kind}:{severity}" if severity else CLEAN


def corrupt_samples(samples: SampleSet, corruption: str, seed: int) -> SampleSet:
    """Return samples whose images are corrupted when read; the noise depends on seed, kind and sample id only."""
    kind, severity = parse_corruption(corruption)
    if kind == CLEAN:
        return samples
    picture, preprocess = samples.picture, samples.preprocess
    if picture is None or preprocess is None:
        raise DataError(
            f"task {samples.task}: only images of a data source can be corrupted",
            hint="Use image data, or remove `corruption`.",
        )

    def load_corrupted_batch(positions: Sequence[int]) -> Any:
        return preprocess(
            [
                corrupt_image(picture(position), kind, severity, (seed, f"{samples.task}/{samples.ids[position]}"))
                for position in positions
            ]
        )

    return replace(samples, load=load_corrupted_batch, picture=None)


def corrupt_image(picture: Picture, kind: str, severity: int, drawn: tuple[int, str]) -> NDArray[np.uint8]:
    """Return a corrupted image [h, w, 3]; equal seeds and sample ids give equal results on every machine.

    Args:
        picture: the image.
        kind: of the corruption.
        severity: 1 to 5.
        drawn: seed and name of the sample.
    """
    from PIL import Image

    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    seed, name = drawn
    # The kind is part of the seed, so that kinds do not share their noise.
    corrupted_pixels = CORRUPTIONS[kind](pixels, severity - 1, seeded_rng(seed, f"{kind}/{name}"))
    # The cast truncates; half a level more rounds to nearest.
    return np.asarray(np.clip(corrupted_pixels, 0, 1) * 255 + 0.5, dtype=np.uint8)


def _gaussian_noise(pixels: Pixels, severity: int, random: np.random.Generator) -> Pixels:
    return pixels + random.normal(scale=(0.08, 0.12, 0.18, 0.26, 0.38)[severity], size=pixels.shape)


def _motion_blur(pixels: Pixels, severity: int, random: np.random.Generator) -> Pixels:
    """Blur an image along a line from each pixel with half-Gaussian weights; borders are extended."""
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[severity]
    scale = min(pixels.shape[:2]) / _SIDE
    angle = math.radians(random.uniform(-45, 45))
    # Steps of at most a pixel, so that small pictures are sampled as finely as large ones.
    steps = np.arange(0, (2 * radius + 1) * scale, min(scale, 1.0))
    weights = np.exp(-((steps / scale) ** 2) / (2 * sigma**2))
    rows, columns = (np.arange(size) for size in pixels.shape[:2])
    blurred = np.zeros_like(pixels)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        down = np.clip(rows + round(step * math.sin(angle)), 0, len(rows) - 1)
        right = np.clip(columns + round(step * math.cos(angle)), 0, len(columns) - 1)
        blurred += weight * pixels[down][:, right]
    return blurred


def _fog(pixels: Pixels, severity: int, random: np.random.Generator) -> Pixels:
    strength, decay = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[severity]
    height, width = pixels.shape[:2]
    fog = _plasma_fractal(max(height, width), decay, random)[:height, :width, None]
    top = pixels.max()
    # As in ImageNet-C, black stays black.
    return np.asarray((pixels + strength * fog) * top / (top + strength))


def _plasma_fractal(side: int, decay: float, random: np.random.Generator) -> Pixels:
    """Generate a fractal map from 0 to 1 by the diamond-square algorithm on a torus."""
    # Halving the step needs a power of two; the caller crops.
    size = 2 ** math.ceil(math.log2(max(side, 2)))
    heights, step, wibble = np.zeros((size, size)), size, 100.0
    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        square = corners + np.roll(corners, -1, 0)
        square = square + np.roll(square, -1, 1)
        heights[half::step, half::step] = square / 4 + random.uniform(-wibble, wibble, square.shape)
        middle = heights[half::step, half::step]
        across, down = middle + np.roll(middle, 1, 0), middle + np.roll(middle, 1, 1)
        ends = corners + np.roll(corners, -1, 1), corners + np.roll(corners, -1, 0)
        heights[::step, half::step] = (across + ends[0]) / 4 + random.uniform(-wibble, wibble, across.shape)
        heights[half::step, ::step] = (down + ends[1]) / 4 + random.uniform(-wibble, wibble, down.shape)
        step, wibble = half, wibble / decay
    heights -= heights.min()
    return np.asarray(heights / max(heights.max(), 1e-12), dtype=np.float64)


CORRUPTIONS: Mapping[str, Change] = {"gaussian_noise": _gaussian_noise, "motion_blur": _motion_blur, "fog": _fog}
