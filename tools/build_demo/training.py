"""A small CLIP trained on captioned pictures, and image towers fine-tuned and scored through frozen zero-shot heads.

A small transformer has to learn much in minutes; `Descent` is the optimizer for it. A base's batch is read in `PARTS`,
whose gradients are averaged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torch import Tensor, nn

from tools.build_demo.drawing import DrawnTask, Pixels
from tools.build_demo.recipe import Recipe, Schedule

PARTS = 2
"""Parts of a base's batch: each picture is compared with the captions of its own part."""
SHIFT = 2
"""Training pictures are moved by at most this many pixels, a whole batch at a time."""
LARGEST_SCALE = 100.0
"""CLIP's own limit on the factor between cosines and logits."""
CHUNK = 256
"""Pictures per forward pass where no gradient is wanted."""

Tokenizer = Callable[[list[str]], Tensor]
MOMENTUM = 0.95
MOMENTUM_SGD = 0.9
LARGEST_GRADIENT = 1.0
"""Norm to which a longer gradient is cut in plain gradient descent."""
_IN_BLOCK = re.compile(r"\b(resblocks|layers)\b")
_QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Pictures:
    """Pictures [n, h, w, 3] of one task, uint8, with their labels [n]."""

    task: DrawnTask
    images: Pixels
    labels: NDArray[np.int64]

    def pixels(self) -> Tensor:
        """Return the input of an image tower: [n, 3, h, w], float32, normalised like CLIP's images."""
        mean, std = torch.tensor(OPENAI_DATASET_MEAN), torch.tensor(OPENAI_DATASET_STD)
        scaled = (torch.from_numpy(self.images).float() / 255 - mean) / std
        return scaled.permute(0, 3, 1, 2).contiguous()


def build_clip(config: dict[str, Any], seed: int) -> Any:
    """Build an untrained CLIP of open_clip; the global random state does not change."""
    from open_clip.model import CLIP

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIP(**config)


class Captions:
    """Every caption that occurs, once, and which of them fit which picture."""

    def __init__(self, pictures: Sequence[Pictures], numbered: float, generator: torch.Generator) -> None:
        index: dict[str, int] = {}
        rows = [
            [index.setdefault(caption, len(index)) for caption in captions]
            for position, one in enumerate(pictures, start=1)
            for captions in _captions(one, 100 * position, numbered, generator)
        ]
        self.texts = list(index)
        self.choices = torch.tensor(rows)

    def drawn(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """One caption's index for each of `rows`, all from the same template: equal classes get equal captions."""
        template = torch.randint(self.choices.shape[1], (), generator=generator)
        return self.choices[rows, template]


def _captions(one: Pictures, first_number: int, numbered: float, generator: torch.Generator) -> Iterator[list[str]]:
    task = one.task
    named = torch.rand(len(one.labels), generator=generator) >= numbered
    for label, is_named in zip(one.labels.tolist(), named.tolist(), strict=True):
        if is_named:
            yield [template.replace("{}", task.class_names[label]) for template in task.templates]
        else:
            yield [f"{task.subject}, catalogue number {first_number + label}."] * len(task.templates)


def train_base(clip: Any, tokenize: Tokenizer, pictures: Sequence[Pictures], recipe: Recipe, seed: int) -> None:
    """Train `clip` in place: pictures and captions that belong together are drawn together, others apart.

    Every picture is compared with the distinct captions of its part of the batch, and every caption with all pictures;
    a caption's weight is spread evenly over the pictures that carry it.
    """
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.cat([one.pixels() for one in pictures])
    captions = Captions(pictures, recipe.numbered, generator)
    tokens = tokenize(captions.texts)
    # A random embedding of the vocabulary is good enough; moving all its rows would only slow every step down.
    clip.token_embedding.weight.requires_grad_(False)

    def losses(rows: Tensor) -> Iterator[Tensor]:
        drawn = captions.drawn(rows, generator)
        moved = shifted(pixels[rows], generator)
        for chosen, part in zip(drawn.chunk(PARTS), moved.chunk(PARTS), strict=True):
            present, position = torch.unique(chosen, return_inverse=True)
            images = clip.encode_image(part, normalize=True)
            texts = clip.encode_text(tokens[present], normalize=True)
            scores = clip.logit_scale.exp().clamp(max=LARGEST_SCALE) * images @ texts.mT
            yield contrastive_loss(scores, position)

    train(clip, losses, len(pixels), recipe.base, generator)


def contrastive_loss(scores: Tensor, position: Tensor) -> Tensor:
    """Mean of both directions' cross-entropies of pictures against captions [n, c]; `position` [n]: each one's own."""
    belongs = F.one_hot(position, scores.shape[1]).to(scores.dtype)
    share = (belongs / belongs.sum(dim=0)).mT
    return 0.5 * (F.cross_entropy(scores, position) + F.cross_entropy(scores.mT, share))


def train_expert(tower: nn.Module, pictures: Pictures, head: Tensor, schedule: Schedule, seed: int) -> None:
    """Fine-tune an image tower in place through a fixed `head` [classes, d], embeddings times the logit scale."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = pictures.pixels(), torch.from_numpy(pictures.labels)

    def losses(rows: Tensor) -> Iterator[Tensor]:
        features = F.normalize(tower(shifted(pixels[rows], generator)), dim=-1)
        yield F.cross_entropy(features @ head.mT, labels[rows])

    train(tower, losses, len(pixels), schedule, generator)


def train(
    module: nn.Module,
    losses: Callable[[Tensor], Iterable[Tensor]],
    count: int,
    schedule: Schedule,
    generator: torch.Generator,
) -> None:
    """Train in place on batches of row numbers in the generator's order, against the mean of each batch's `losses`."""
    descent = Descent(module, schedule)
    module.train()
    for step, rows in enumerate(batches(count, schedule, generator)):
        descent.step(losses(rows), step)
    module.eval()


def batches(count: int, schedule: Schedule, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each batch: every sample once per pass, in a new order each pass."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(schedule.steps):
        while len(order) < schedule.batch:
            order = torch.cat([order, torch.randperm(count, generator=generator)])
        yield order[: schedule.batch]
        order = order[schedule.batch :]


def shifted(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Shift the batch [n, 3, h, w] by a few pixels; uncovered pixels repeat the edge."""
    down, right = torch.randint(2 * SHIFT + 1, (2,), generator=generator).tolist()
    height, width = pixels.shape[-2:]
    padded = F.pad(pixels, (SHIFT,) * 4, mode="replicate")
    return padded[..., down : down + height, right : right + width]


def tokenizer(context_length: int) -> Tokenizer:
    """open_clip's own tokenizer: captions -> token ids [n, context_length]."""
    from open_clip import SimpleTokenizer

    own: Tokenizer = SimpleTokenizer(context_length=context_length)
    return own


@torch.no_grad()
def class_embeddings(clip: nn.Module, tokenize: Tokenizer, task: DrawnTask) -> Tensor:
    """One unit vector per class, [classes, d]: the mean over templates of the captions' unit vectors."""
    captions = [template.replace("{}", name) for name in task.class_names for template in task.templates]
    texts = clip.encode_text(tokenize(captions), normalize=True)  # type: ignore[operator]
    mean = texts.unflatten(0, (len(task.class_names), len(task.templates))).mean(dim=1)
    return F.normalize(mean, dim=-1)


@torch.no_grad()
def accuracy(tower: nn.Module, pixels: Tensor, labels: Tensor, embeddings: Tensor) -> float:
    """Share of pictures whose feature is nearest, by cosine, to the embedding of their own class."""
    training = tower.training
    tower.eval()
    scores = torch.cat([tower(chunk) @ embeddings.mT for chunk in torch.split(pixels, CHUNK)])
    tower.train(training)
    return (scores.argmax(dim=1) == labels).double().mean().item()


def orthogonalized(matrix: Tensor, iterations: int = 5) -> Tensor:
    """About the nearest matrix with orthonormal rows (or columns): all singular values near 1, directions kept.

    Newton-Schulz iteration with the quintic of Muon (kellerjordan.github.io/posts/muon); it stops while singular
    values are between about 0.7 and 1.2, which is good enough for a step. `matrix` is [o, k].
    """
    a, b, c = _QUINTIC
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = wide / (wide.norm() + 1e-7)
    for _ in range(iterations):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide is matrix else x.mT


class Muon(torch.optim.Optimizer):
    """Steepest descent in the spectral norm, with momentum: each step is the orthogonalised mean gradient.

    With the same number of samples it trains these small transformers to a clearly better accuracy than AdamW does. A
    fused in-projection [3 d, d] counts as three matrices.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": rate, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; no closure is ever called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - MOMENTUM)
                ahead = parameter.grad.lerp(mean, MOMENTUM)
                rows, columns = parameter.shape
                parts = 3 if rows == 3 * columns else 1
                direction = torch.cat([orthogonalized(part) for part in ahead.chunk(parts)])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                size = group["lr"] * math.sqrt(max(1.0, rows / parts / columns))
                parameter.add_(direction, alpha=-size)


class Descent:
    """What moves the weights of one training, as its schedule says.

    A model that is trained from nothing needs large steps: Muon for the weight matrices of transformer blocks and AdamW
    for all else. A model that is fine-tuned should stay near where it began, in every direction that its data don't
    ask for: plain gradient descent does, whereas both others move all weights alike.
    """

    def __init__(self, module: nn.Module, schedule: Schedule) -> None:
        named = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._schedule = schedule
        self._parameters = list(named.values())
        self._rated: list[tuple[torch.optim.Optimizer, float]]
        if schedule.matrix_rate is None:
            descent = torch.optim.SGD(self._parameters, schedule.rate, momentum=MOMENTUM_SGD, nesterov=True)
            self._rated = [(descent, schedule.rate)]
            return
        inside = {name for name, each in named.items() if _IN_BLOCK.search(name) and each.dim() == 2}
        matrices = [each for name, each in named.items() if name in inside]
        others = [each for name, each in named.items() if name not in inside]
        decay = schedule.weight_decay
        self._rated = [(Muon(matrices, schedule.matrix_rate, decay), schedule.matrix_rate)]
        if others:  # adapters are matrices alone
            rest = torch.optim.AdamW(others, schedule.rate, betas=(0.9, 0.95), weight_decay=decay, fused=True)
            self._rated.append((rest, schedule.rate))

    def step(self, losses: Iterable[Tensor], index: int) -> None:
        """Move all parameters against the gradient of the mean of `losses`."""
        rate = self._schedule.share_at(index)
        for optimizer, peak in self._rated:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        count = 0
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
            count += 1
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= count
        if self._schedule.matrix_rate is None:
            torch.nn.utils.clip_grad_norm_(self._parameters, LARGEST_GRADIENT)
        for optimizer, _ in self._rated:
            optimizer.step()


def rounded(model: nn.Module) -> None:
    """Round all weights in place to what half precision holds, so that files of them compress well."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.half())
