"""What the written tasks share: small grammars that are filled in at random, and texts divided between the splits."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from driftlens.base.registry import Registry
from driftlens.suites.drawing import Purpose

Rules = Mapping[str, str]
"""A symbol and what it may stand for, separated by ` | `; `{symbol}` in there stands for another choice."""
Write = Callable[[np.random.Generator, str], str]
"""(random numbers, class) -> a text whose answer is that class."""

_SYMBOL = re.compile(r"\{(\w+)\}")
_TEST_SHARE = 4
"""One text in so many belongs to the test split; which one, its own letters say."""


def written(rng: np.random.Generator, text: str, rules: Rules) -> str:
    """`text` with every `{symbol}` replaced by one of what it may stand for, until none is left."""

    def choice(found: re.Match[str]) -> str:
        options = rules[found[1]].split(" | ")
        return written(rng, options[rng.integers(len(options))], rules)

    return _SYMBOL.sub(choice, text)


@dataclass(frozen=True)
class WrittenTask:
    """One text task whose texts come from code and whose answer is one word.

    Attributes:
        name: the task's name.
        classes: the words that may be the answer.
        prompt: what is asked, with `{input}` for the text.
        write: writes one text.
    """

    name: str
    classes: tuple[str, ...]
    prompt: str
    write: Write

    def rows(self, purpose: Purpose, count: int, seed: int) -> Iterator[tuple[str, str]]:
        """`count` different texts with their answers: classes equally often (to within one), in random order.

        Each purpose has random numbers of its own. No text of the test split is ever one of the others.
        """
        rng = np.random.default_rng([seed, zlib.crc32(f"{self.name}/{purpose}".encode())])
        seen: set[str] = set()
        for label in rng.permutation(np.arange(count) % len(self.classes)).tolist():
            text = ""
            while not text or text in seen or _is_test(text) != (purpose == "test"):
                text = self.write(rng, self.classes[label])
            seen.add(text)
            yield text, self.classes[label]


def _is_test(text: str) -> bool:
    return zlib.crc32(text.encode()) % _TEST_SHARE == 0


texts: Registry[WrittenTask] = Registry("text task", "driftlens.suites.texts")


def written_task(name: str, *, classes: str, prompt: str) -> Callable[[Write], Write]:
    """Decorator that files the function writing one text as the task `name`."""

    def file(write: Write) -> Write:
        texts.register(name)(WrittenTask(name, tuple(classes.split()), prompt, write))
        return write

    return file
