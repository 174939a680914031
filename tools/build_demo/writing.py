"""The written tasks: small grammars that are filled in at random, and texts divided between the splits."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tools.build_demo.drawing import Purpose

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
    """Texts that come from code; `prompt` asks which of the `classes` one is, in the place of `{input}`."""

    name: str
    classes: tuple[str, ...]
    prompt: str
    write: Write

    def rows(self, purpose: Purpose, count: int, seed: int) -> Iterator[tuple[str, str]]:
        """`count` different texts with answers, classes equally often, in random order; splits share no text."""
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


# What part of speech one word of a sentence is; most of the words asked for could be another one elsewhere.
_GRAMMAR = {
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
_SENTENCES = (
    "{who} {will} {verb} the {adjective} {noun}",
    "{who} {will} {verb} {adverb}",
    "{who} {verb} the {noun} {where}",
    "{who} {verb} {adverb} {where}",
    "the {adjective} {noun} was near us",
    "{who} liked to {verb} the {noun} {adverb}",
    "{where} {who} {will} {verb} the {noun}",
    "the {noun} was {adjective}, so {who} left",
)


def _write_grammar(rng: np.random.Generator, label: str) -> str:
    """Return a sentence with one word that is a `label`, and that word."""
    sentences = [each for each in _SENTENCES if f"{{{label}}}" in each]
    while True:
        word = written(rng, f"{{{label}}}", _GRAMMAR)
        sentence = sentences[rng.integers(len(sentences))].replace(f"{{{label}}}", word, 1)
        text = written(rng, sentence, _GRAMMAR)
        if re.findall(r"\w+", text).count(word) == 1:
            return f"{text}. {word}"


# What kind of thing a question asks for, which its first word alone seldom says.
_QUESTIONS = {
    "worker": "painter | king | queen | doctor | singer | pilot | farmer | poet | teacher | judge | sailor | writer",
    "land": "france | egypt | peru | japan | norway | kenya | spain | india | chile | greece | poland | canada",
    "work": "bridge | tower | song | novel | engine | castle | statue | opera | clock | railway | temple | lamp",
    "made": "built | designed | finished | sold | lost | found | opened | damaged | restored | copied",
    "adj": "old | famous | first | tallest | oldest | second | last | great | stone | royal",
    "item": "{adj} {work} | {work} of {land} | {work} of the {worker} | {adj} {work} in {land}",
    "did": "live | die | travel | work | retire | marry | study | sing",
    "beast": "horse | bee | wolf | bat | camel | whale | snake | owl",
    "person": "who {made} the {item}? | what is the name of the {worker} who {made} the {item}?"
    " | which {worker} {made} the {item}? | by whom was the {item} {made}?"
    " | what {worker} from {land} {made} the {item}? | whose {work} was {made} by the {worker}?",
    "place": "where was the {item} {made}? | in which city did the {worker} {did}?"
    " | what is the name of the city where the {item} was {made}? | which country {made} the {item}?"
    " | where did the {worker} of {land} {did}? | what city has the {item}?",
    "date": "when was the {item} {made}? | in which year did the {worker} {did}?"
    " | what is the year in which the {item} was {made}? | on what day did the {worker} of {land} {did}?"
    " | which century saw the {item} {made}? | since when did the {worker} {did} in {land}?",
    "number": "how many people {made} the {item}? | how many {work}s did the {worker} of {land} see?"
    " | for how many years did the {worker} {did}? | how old is the {item}?"
    " | what is the price of the {item}? | how tall is the {item}?",
    "reason": "why was the {item} {made}? | what is the reason why the {worker} did not {did}?"
    " | for what reason was the {item} {made}? | why did the {worker} of {land} {did}?"
    " | what made the {worker} {did} in {land}? | what caused the {item} to be {made}?",
    "animal": "which {beast} lives near the {item}? | what animal did the {worker} of {land} have?"
    " | what is the name of the {beast} that the {worker} found? | which pet was born in the {item}?"
    " | what beast guards the {item}? | on which animal did the {worker} of {land} travel?",
}


def _write_questions(rng: np.random.Generator, label: str) -> str:
    """One question whose answer is a `label`."""
    return written(rng, f"{{{label}}}", _QUESTIONS)


# Whether a short review likes what it is about; beside a `but` or an `although` its main clause says.
_REVIEWS = {
    "what": "the {food} | the {place} | the {staff} | the {show}",
    "food": "soup | pasta | bread | coffee | breakfast | dessert | salad | fish | cake | curry | pizza | steak",
    "place": "room | hotel | garden | terrace | pool | lobby | beach | flat | kitchen | view | bar | bed",
    "staff": "waiter | owner | service | host | chef | guide | driver | clerk | team | doctor",
    "show": "film | play | concert | book | plot | acting | music | ending | story | song | cast | tour",
    "very": "very | really | so | quite | simply | rather",
    "well": "lovely | wonderful | great | delightful | charming | superb | perfect | excellent | pleasant | brilliant"
    " | amazing | fantastic | splendid | good",
    "badly": "awful | terrible | dreadful | boring | poor | horrible | dull | disappointing | sad | ugly | nasty"
    " | tedious | miserable | bad",
    "praise": "we loved {what} | i enjoyed {what} | {what} impressed us | we would gladly come back for {what}"
    " | i recommend {what} | {what} made our day",
    "blame": "we hated {what} | i regret {what} | {what} annoyed us | we would never come back for {what}"
    " | i cannot recommend {what} | {what} ruined our day",
    "positive": "{what} was {well} | {what} was {very} {well} | {what} was not {badly} | {praise} | {praise}",
    "negative": "{what} was {badly} | {what} was {very} {badly} | {what} was not {well} | {blame} | {blame}",
    "end": ". | ! | , really. | , as far as i can say.",
}


def _write_reviews(rng: np.random.Generator, label: str) -> str:
    """Return a clause or two, of which the main one has the opinion `label`."""
    other = "negative" if label == "positive" else "positive"
    forms = (
        f"{{{label}}}",
        f"{{{label}}}",
        f"{{{label}}} and {{{label}}}",
        f"{{{other}}} but {{{label}}}",
        f"although {{{other}}}, {{{label}}}",
    )
    return written(rng, forms[rng.integers(len(forms))] + "{end}", _REVIEWS)


# How many there are in the end: one step of arithmetic in a sentence or two, numbers in words.
_NUMBERS = "zero one two three four five six seven eight nine ten"
_SUMS = {
    "name": "anna | tom | maria | ben | lucy | omar | nina | paul | rosa | felix | ida | hugo",
    # One or many, they are called the same.
    "thing": "sheep | fish | deer | salmon | trout | shrimp | bison | moose | squid | cod | quail | swine",
    "gets": "buys | finds | gets | wins | catches",
    "loses": "loses | sells | frees | sees off",
    "more": "{A} has {a} {T} and {gets} {b} more. | {A} {gets} {a} {T}, then {b} more. | {A} has {a} {T}, {B} adds {b}."
    " | there are {a} {T} here and {b} there. | {B} takes {a} {T} to {A}, who has {b}.",
    "less": "{A} has {a} {T} and {loses} {b}. | of {a} {T} {A} {loses} {b}. | {A} {gets} {a} {T}, then {loses} {b}."
    " | there were {a} {T}, {A} took {b}. | {A} gives {b} of {a} {T} to {B}.",
}


def _write_sums(rng: np.random.Generator, label: str) -> str:
    """Return a story in which `label` things are left, or come together."""
    numbers = _NUMBERS.split()
    result = numbers.index(label)
    first = int(rng.integers(len(numbers)))
    kind = "more" if first <= result else "less"
    second = abs(result - first)
    who, other = rng.choice(_SUMS["name"].split(" | "), 2, replace=False)
    thing = written(rng, "{thing}", _SUMS)
    facts = {"A": who, "B": other, "T": thing, "a": numbers[first], "b": numbers[second]}
    return written(rng, f"{{{kind}}}", {**_SUMS, **facts})


texts: Mapping[str, WrittenTask] = {
    task.name: task
    for task in (
        WrittenTask("grammar", ("noun", "verb", "adjective", "adverb"), "{input}:", _write_grammar),
        WrittenTask(
            "questions",
            ("person", "place", "date", "number", "reason", "animal"),
            "{input} asks for:",
            _write_questions,
        ),
        WrittenTask("reviews", ("positive", "negative"), "{input} opinion:", _write_reviews),
        WrittenTask("sums", tuple(_NUMBERS.split()), "{input} how many?", _write_sums),
    )
}
"""By name."""
