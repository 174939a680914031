"""What kind of thing a question asks for, which its first word alone seldom says."""

from __future__ import annotations

import numpy as np

from driftlens.suites.writing import written, written_task

RULES = {
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


@written_task("questions", classes="person place date number reason animal", prompt="{input} asks for:")
def write(rng: np.random.Generator, label: str) -> str:
    """One question whose answer is a `label`."""
    return written(rng, f"{{{label}}}", RULES)
