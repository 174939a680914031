"""A small CLIP trained on captioned pictures, and image towers fine-tuned and scored through frozen zero-shot heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.suites.descent import Descent
from driftlens.suites.drawing.task import DrawnTask
from driftlens.suites.pictures import TaskPictures
from driftlens.suites.recipe import Recipe, Schedule
from driftlens.suites.workers import Worker

SHIFT = 2
"""Training pictures are moved by at most this many pixels, a whole batch at a time."""
LARGEST_SCALE = 100.0
"""CLIP's own limit on the factor between cosines and logits."""
CHUNK = 256
"""Pictures per forward pass where no gradient is wanted."""

Tokenizer = Callable[[list[str]], Tensor]
OnStep = Callable[[int, float], None]
"""Called with the number of steps done and the loss."""


def build_clip(config: dict[str, Any], seed: int) -> Any:
    """An untrained CLIP of open_clip; the global random numbers stay as they were."""
    from open_clip.model import CLIP

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIP(**config)


class Captions:
    """Every caption that occurs, once, and which of them fit which picture.

    Attributes:
        texts: the distinct captions.
        choices: [n, templates], for each picture the indices of the captions that fit it.
    """

    def __init__(self, pictures: Sequence[TaskPictures], numbered: float, generator: torch.Generator) -> None:
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


def _captions(
    one: TaskPictures, first_number: int, numbered: float, generator: torch.Generator
) -> Iterator[list[str]]:
    task = one.task
    named = torch.rand(len(one.base.labels), generator=generator) >= numbered
    for label, is_named in zip(one.base.labels.tolist(), named.tolist(), strict=True):
        if is_named:
            yield [template.replace("{}", task.class_names[label]) for template in task.templates]
        else:
            yield [f"{task.subject}, catalogue number {first_number + label}."] * len(task.templates)


def train_base(
    clip: Any,
    tokenize: Tokenizer,
    pictures: Sequence[TaskPictures],
    recipe: Recipe,
    seed: int,
    on_step: OnStep,
    worker: Worker,
) -> None:
    """Train `clip` in place: pictures and captions that belong together are drawn together, others apart.

    Every picture is compared with the distinct captions of its batch, and every caption with all pictures; a
    caption's weight is spread evenly over the pictures that carry it. Workers that train together each compare what
    is in their own part of the batch.
    """
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.cat([one.base.pixels() for one in pictures])
    captions = Captions(pictures, recipe.numbered, generator)
    tokens = tokenize(captions.texts)
    # A random embedding of the vocabulary is good enough; moving all its rows would only slow every step down.
    clip.token_embedding.weight.requires_grad_(False)
    descent = Descent(clip, recipe.base)
    clip.train()
    for step, rows in enumerate(batches(len(pixels), recipe.base, generator)):
        drawn = captions.drawn(rows, generator)
        present, position = torch.unique(worker.rows(drawn), return_inverse=True)
        images = clip.encode_image(shifted(pixels[worker.rows(rows)], generator), normalize=True)
        texts = clip.encode_text(tokens[present], normalize=True)
        loss = contrastive_loss(clip.logit_scale.exp().clamp(max=LARGEST_SCALE) * images @ texts.mT, position)
        descent.step(loss, step, worker)
        on_step(step + 1, loss.item())
    clip.eval()


def contrastive_loss(scores: Tensor, position: Tensor) -> Tensor:
    """Mean of both directions' cross-entropies.

    Args:
        scores: [n, c], pictures against the distinct captions of the batch.
        position: [n], the caption that belongs to each picture.
    """
    belongs = F.one_hot(position, scores.shape[1]).to(scores.dtype)
    share = (belongs / belongs.sum(dim=0)).mT
    return 0.5 * (F.cross_entropy(scores, position) + F.cross_entropy(scores.mT, share))


def train_expert(
    tower: nn.Module,
    pixels: Tensor,
    labels: Tensor,
    head: Tensor,
    schedule: Schedule,
    seed: int,
    on_step: OnStep,
) -> None:
    """Fine-tune the image tower in place by cross-entropy through a head that stays as it is.

    Args:
        tower: image tower with the base's weights.
        pixels: [n, 3, h, w].
        labels: [n].
        head: [classes, d], class embeddings times the logit scale.
        schedule: how long and how fast.
        seed: of the order of pictures and of their shifts.
        on_step: called after every step.
    """
    generator = torch.Generator().manual_seed(seed)
    descent = Descent(tower, schedule)
    tower.train()
    for step, rows in enumerate(batches(len(pixels), schedule, generator)):
        features = F.normalize(tower(shifted(pixels[rows], generator)), dim=-1)
        loss = F.cross_entropy(features @ head.mT, labels[rows])
        descent.step(loss, step)
        on_step(step + 1, loss.item())
    tower.eval()


def batches(count: int, schedule: Schedule, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each batch: every sample once per pass, in a new order each pass."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(schedule.steps):
        while len(order) < schedule.batch:
            order = torch.cat([order, torch.randperm(count, generator=generator)])
        yield order[: schedule.batch]
        order = order[schedule.batch :]


def shifted(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """The batch [n, 3, h, w] moved by a few pixels; what is uncovered repeats the edge."""
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
