"""Whether a short review likes what it is about; beside a `but` or an `although` its main clause says."""

from __future__ import annotations

import numpy as np

from driftlens.suites.writing import written, written_task

RULES = {
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


@written_task("reviews", classes="positive negative", prompt="{input} opinion:")
def write(rng: np.random.Generator, label: str) -> str:
    """A clause or two, of which the main one has the opinion `label`."""
    other = "negative" if label == "positive" else "positive"
    forms = (
        f"{{{label}}}",
        f"{{{label}}}",
        f"{{{label}}} and {{{label}}}",
        f"{{{other}}} but {{{label}}}",
        f"although {{{other}}}, {{{label}}}",
    )
    return written(rng, forms[rng.integers(len(forms))] + "{end}", RULES)
