"""Classes as captions: the frozen head of an expert, and how often a tower is right with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.suites.drawing.task import DrawnTask

Tokenizer = Callable[[list[str]], Tensor]

CHUNK = 256
"""Pictures per forward pass where no gradient is wanted."""


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
