"""How many there are in the end: one step of arithmetic in a sentence or two, numbers in words."""

from __future__ import annotations

import numpy as np

from driftlens.suites.writing import written, written_task

NUMBERS = "zero one two three four five six seven eight nine ten"
RULES = {
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


@written_task("sums", classes=NUMBERS, prompt="{input} how many?")
def write(rng: np.random.Generator, label: str) -> str:
    """A story in which `label` things are left, or come together."""
    numbers = NUMBERS.split()
    result = numbers.index(label)
    first = int(rng.integers(len(numbers)))
    kind = "more" if first <= result else "less"
    second = abs(result - first)
    who, other = rng.choice(RULES["name"].split(" | "), 2, replace=False)
    thing = written(rng, "{thing}", RULES)
    facts = {"A": who, "B": other, "T": thing, "a": numbers[first], "b": numbers[second]}
    return written(rng, f"{{{kind}}}", {**RULES, **facts})
