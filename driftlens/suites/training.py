"""A small CLIP trained on captioned pictures, and image towers fine-tuned and scored through frozen zero-shot heads.

A small transformer has to learn much in the time of a coffee; `Descent` is the optimiser that makes it. Two processes
draw, train one model together, and train others apart, each with one thread: models this small gain little from a
second one, while two processes do two things at once. What they make does not depend on the number of cores.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier, Lock
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from driftlens.base.errors import RunError
from driftlens.suites.drawing import DrawnTask, Pixels
from driftlens.suites.recipe import Recipe, Schedule

NUM_WORKERS = 2

_PATIENCE = 1.0
"""Seconds after which a process that has died without a word is noticed."""

Job = TypeVar("Job")


@dataclass
class Worker:
    """One of the processes: its share of jobs and batches, and what all of them share."""

    rank: int
    _news: Connection
    _turn: Lock
    _barrier: Barrier
    _gradients: Any
    _step: int = field(default=0, init=False)

    def jobs(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Those of `jobs` that are this worker's."""
        return jobs[self.rank :: NUM_WORKERS]

    def rows(self, batch: Tensor) -> Tensor:
        """This worker's part of a batch of row numbers."""
        return batch.chunk(NUM_WORKERS)[self.rank]

    def tell(self, *news: Any) -> None:
        """Say something to the process that started this one."""
        with self._turn:
            self._news.send(news)

    def told_by_first(self, phase: str) -> Callable[[int, float], None]:
        """Tells steps and losses of what all workers do together, once."""
        return lambda done, loss: self.tell(phase, "", done, loss) if self.rank == 0 else None

    def meet(self) -> None:
        """Wait until all workers have come here."""
        self._barrier.wait()

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the mean over all workers in the place of each gradient; every worker must call it as often."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        # Two buffers take turns: who is a step ahead must not write where another still reads.
        shared = torch.frombuffer(self._gradients, dtype=torch.float32).view(2, NUM_WORKERS, -1)
        buffer = shared[self._step % 2, :, : len(flat)]
        self._step += 1
        buffer[self.rank] = flat
        self.meet()
        parts = torch.split(buffer.mean(dim=0), [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def work_together(
    work: Callable[..., None], arguments: Sequence[Any], on_news: Callable[..., None], num_values: int
) -> None:
    """Run `work(worker, *arguments)` in every process; `on_news` hears them, in order; no process is left."""
    context = multiprocessing.get_context("spawn")  # a fork of a process that runs threads may hang
    reader, writer = context.Pipe(duplex=False)
    gradients = context.RawArray(ctypes.c_float, 2 * NUM_WORKERS * num_values)
    shared = (writer, context.Lock(), context.Barrier(NUM_WORKERS), gradients)
    workers = [Worker(rank, *shared) for rank in range(NUM_WORKERS)]
    processes = [
        context.Process(target=_begin, args=(work, worker, arguments), daemon=True) for worker in workers
    ]
    num_started, script = 0, sys.modules["__main__"]
    # A process first imports the script that this one runs, which may begin its work, and so this, by being imported.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        for process in processes:
            process.start()
            num_started += 1
        sys.modules["__main__"] = script
        num_done = 0
        while num_done < len(processes):
            # A worker's last word says that it is done, not its exit code: that may have gone to somebody else who
            # waits for processes.
            ended = sum(bool(wait([process.sentinel], 0)) or not process.is_alive() for process in processes)
            if reader.poll(0 if ended > num_done else _PATIENCE):
                news = reader.recv()
                if isinstance(news, BaseException):
                    raise news
                if news is None:
                    num_done += 1
                else:
                    on_news(*news)
            elif (
                ended > num_done
            ):  # nothing is left to read, and not all of them have said that they are done
                raise RunError(
                    "a process that was building the embedded suite ended unexpectedly",
                    hint="It may have run out of memory; the same command begins anew.",
                )
    finally:
        sys.modules["__main__"] = script
        for process in processes[:num_started]:
            process.kill()
            process.join()


def _begin(work: Callable[..., None], worker: Worker, arguments: Sequence[Any]) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all; the process that started this one decides
    torch.set_num_threads(1)
    try:
        work(worker, *arguments)
        with worker._turn:
            worker._news.send(None)
    except Exception as error:
        try:
            with worker._turn:
                worker._news.send(error)
        finally:
            worker._barrier.abort()  # nobody else need wait, should nobody be left to end them


SHIFT = 2
"""Training pictures are moved by at most this many pixels, a whole batch at a time."""
LARGEST_SCALE = 100.0
"""CLIP's own limit on the factor between cosines and logits."""
CHUNK = 256
"""Pictures per forward pass where no gradient is wanted."""

Tokenizer = Callable[[list[str]], Tensor]
OnStep = Callable[[int, float], None]
"""Called with the number of steps done and the loss."""
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
        """What an image tower takes: [n, 3, h, w], float32, normalised as CLIP's images are."""
        from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

        mean, std = torch.tensor(OPENAI_DATASET_MEAN), torch.tensor(OPENAI_DATASET_STD)
        scaled = (torch.from_numpy(self.images).float() / 255 - mean) / std
        return scaled.permute(0, 3, 1, 2).contiguous()


def build_clip(config: dict[str, Any], seed: int) -> Any:
    """An untrained CLIP of open_clip; the global random numbers stay as they were."""
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


def _captions(
    one: Pictures, first_number: int, numbered: float, generator: torch.Generator
) -> Iterator[list[str]]:
    task = one.task
    named = torch.rand(len(one.labels), generator=generator) >= numbered
    for label, is_named in zip(one.labels.tolist(), named.tolist(), strict=True):
        if is_named:
            yield [template.replace("{}", task.class_names[label]) for template in task.templates]
        else:
            yield [f"{task.subject}, catalogue number {first_number + label}."] * len(task.templates)


def train_base(
    clip: Any,
    tokenize: Tokenizer,
    pictures: Sequence[Pictures],
    recipe: Recipe,
    seed: int,
    worker: Worker,
) -> None:
    """Train `clip` in place: pictures and captions that belong together are drawn together, others apart.

    Every picture is compared with the distinct captions of its batch, and every caption with all pictures; a
    caption's weight is spread evenly over the pictures that carry it. Workers that train together each compare what
    is in their own part of the batch.
    """
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.cat([one.pixels() for one in pictures])
    captions = Captions(pictures, recipe.numbered, generator)
    tokens = tokenize(captions.texts)
    # A random embedding of the vocabulary is good enough; moving all its rows would only slow every step down.
    clip.token_embedding.weight.requires_grad_(False)

    def loss(rows: Tensor) -> Tensor:
        drawn = captions.drawn(rows, generator)
        present, position = torch.unique(worker.rows(drawn), return_inverse=True)
        images = clip.encode_image(shifted(pixels[worker.rows(rows)], generator), normalize=True)
        texts = clip.encode_text(tokens[present], normalize=True)
        scores = clip.logit_scale.exp().clamp(max=LARGEST_SCALE) * images @ texts.mT
        return contrastive_loss(scores, position)

    train(clip, loss, len(pixels), recipe.base, generator, worker.told_by_first("train base"), worker)


def contrastive_loss(scores: Tensor, position: Tensor) -> Tensor:
    """Mean of both directions' cross-entropies of pictures against captions [n, c]; `position` [n]: each one's own."""
    belongs = F.one_hot(position, scores.shape[1]).to(scores.dtype)
    share = (belongs / belongs.sum(dim=0)).mT
    return 0.5 * (F.cross_entropy(scores, position) + F.cross_entropy(scores.mT, share))


def train_expert(
    tower: nn.Module, pictures: Pictures, head: Tensor, schedule: Schedule, seed: int, on_step: OnStep
) -> None:
    """Fine-tune an image tower in place through a fixed `head` [classes, d], embeddings times the logit scale."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = pictures.pixels(), torch.from_numpy(pictures.labels)

    def loss(rows: Tensor) -> Tensor:
        features = F.normalize(tower(shifted(pixels[rows], generator)), dim=-1)
        return F.cross_entropy(features @ head.mT, labels[rows])

    train(tower, loss, len(pixels), schedule, generator, on_step)


def train(
    module: nn.Module,
    loss: Callable[[Tensor], Tensor],
    count: int,
    schedule: Schedule,
    generator: torch.Generator,
    on_step: OnStep,
    worker: Worker | None = None,
) -> None:
    """Train in place on batches of row numbers in the generator's order; a `worker`, on its part of them."""
    descent = Descent(module, schedule)
    module.train()
    for step, rows in enumerate(batches(count, schedule, generator)):
        reached = loss(rows)
        descent.step(reached, step, worker)
        on_step(step + 1, reached.item())
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

    def step(self, loss: Tensor, index: int, worker: Worker | None = None) -> None:
        """Move all parameters against the gradient, with a `worker` against the mean over workers."""
        rate = self._schedule.share_at(index)
        for optimizer, peak in self._rated:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        loss.backward()  # type: ignore[no-untyped-call]
        if worker is not None:
            worker.average_gradients(self._parameters)
        if self._schedule.matrix_rate is None:
            torch.nn.utils.clip_grad_norm_(self._parameters, LARGEST_GRADIENT)
        for optimizer, _ in self._rated:
            optimizer.step()
