"""What part of speech one word of a sentence is; most of the words asked for could be another one elsewhere."""

from __future__ import annotations

import re

import numpy as np

from driftlens.suites.writing import written, written_task

RULES = {
    "both": "play | walk | watch | guard | paint | cook | plant | water | dress | answer | dance | rest | cut | land",
    "noun": "{both} | {both} | garden | river | letter | window | bridge | story | lamp",
    "verb": "{both} | {both} | follow | forget | find | describe | enjoy | carry",
    "some": "fast | late | hard | early | straight | daily",
    "adjective": "{some} | {some} | old | green | quiet | strange | heavy",
    "adverb": "{some} | {some} | slowly | often | gladly | well | badly",
    "who": "they | we | the children | the farmers | two sisters | my friends | some people | the sailors",
    "will": "will | can | must | may | did not | should",
    "where": "in the city | at home | near the sea | after school | on sunday | in may",
}
SENTENCES = (
    "{who} {will} {verb} the {adjective} {noun}",
    "{who} {will} {verb} {adverb}",
    "{who} {verb} the {noun} {where}",
    "{who} {verb} {adverb} {where}",
    "the {adjective} {noun} was near us",
    "{who} liked to {verb} the {noun} {adverb}",
    "{where} {who} {will} {verb} the {noun}",
    "the {noun} was {adjective}, so {who} left",
)


@written_task("grammar", classes="noun verb adjective adverb", prompt="{input}:")
def write(rng: np.random.Generator, label: str) -> str:
    """A sentence with one word that is a `label`, and that word."""
    sentences = [each for each in SENTENCES if f"{{{label}}}" in each]
    while True:
        word = written(rng, f"{{{label}}}", RULES)
        sentence = sentences[rng.integers(len(sentences))].replace(f"{{{label}}}", word, 1)
        text = written(rng, sentence, RULES)
        if re.findall(r"\w+", text).count(word) == 1:
            return f"{text}. {word}"
