"""The page of merge methods: made of what their registry says of each.

    python -m tests.mergers > docs/mergers.md

`test_mergers.py` fails where the file says something else.
"""

from __future__ import annotations

import sys
from pathlib import Path

from driftlens.merging.method import READS, MergeMethod, merge_methods
from driftlens.utils.settings import settings_of

FILE = Path(__file__).resolve().parents[1] / "docs" / "mergers.md"
EXPERTS, SAMPLES, CLASSES = 8, 64, 10

HEAD = f"""# Merge methods

Made from the registry by `python -m tests.mergers`. In a spec: `merge: {{method: ties, scaling: 0.4}}`; to a file or
folder: `driftlens merge SPEC --method ties --set scaling=0.4 --out FOLDER`; in the dashboard: New run, New merge.
Defaults are those published; where a paper searches a setting on labelled data, the default is a middling value of
its range, and `--set` or the spec decides. WUDI's published rate, 1e-5, is absolute and suits the experts it was
published with; by default the rate follows the size of the task vectors, and `learning_rate=1e-5` is as published.
The cost is beside reading every file once and a few tensors in memory: for {EXPERTS} experts, {SAMPLES} samples of a
task and {CLASSES} classes at the defaults. `driftlens validate` says what memory an analysis with the merge takes.
Nothing here is a ranking.

"""

WHEN = {
    "No base": lambda entry: not entry.needs_base,
    "Only weights, no data": lambda entry: not entry.runs_models,
    "Calibration samples without labels": lambda entry: entry.runs_models and not entry.scores,
    "Samples without labels, and a score map of every task": lambda entry: entry.scores,
    "A strength to vary on a straight line from the base": lambda entry: (
        {"affine_in_scaling", "zero_scaling_is_base"} <= entry.laws
    ),
    "The least memory: pieces of a tensor at a time": lambda entry: entry.reads == "entry",
    "Queries, keys and values as matrices of their own": lambda entry: entry.reads_sites,
}
"""What somebody has or wants, and which methods are for it: read off the registry and the laws that tests check."""

ANCHOR = """
Which is best for your experts is an empirical question: `driftlens merge SPEC --compare all` (or
`dl.compare_merges(SPEC)`, or several methods under New merge) ranks them without labels by the
Hellinger distance of class probabilities and final drift to the experts, with intervals, on calibration samples that no
method has read, and says which can't be told apart.

FeatCal pulls towards an anchor, base + rho (merged - base). At rho 1 that is the merged model. Elsewhere it is
another merge: of methods on a straight line from the base it is the same method with rho times the scaling, of all
others rho times the step that the method makes; each calibration says which, and measures the anchor alone beside it.
How much of a gain is left without that other merge says `driftlens sweep RUN --param rho=1`, with the preset
and samples of the calibration.

## The same every time, or in law

A merge is computed with one thread, whatever `--threads` says. Products, sums and decompositions are parted among
threads and rounded by their parts: at width 256 half of the methods gave other last bits with two threads than with
one. So weights are the same, bit by bit, however many cores there are. It costs time where there are many and a matrix
method or one that runs models on the CPU; judging merges, measuring and calibrating keep their threads.

Both libraries' forms of one model merge to one network: parameters come alike from every file format, queries, keys and
values apart and matrices upright, under names that the formats share, which random masks follow.

Random masks (`dare`, `ties` with `drop_rate`) follow seed, task, parameter and place alone. Their laws hold
over draws, not for one of them: each entry stays with its chance, and the mean over masks is the task vector. What
mergekit draws depends on the order of its work, so a DARE of its own has other masks.

## Recipes of mergekit

mergekit makes the merge of a recipe. `driftlens why recipe.yml merged/` takes base and experts from the recipe and
measures what `mergekit-yaml` wrote to `merged/`; without `merged/` it calls `mergekit-yaml`, if that is installed.
`driftlens init recipe.yml` writes a spec of the same models with the nearest method of ours: `ties`, `dare_linear`,
`dare_ties`, `task_arithmetic`, `linear`, `slerp` and `model_stock` have one, with weights and densities where all
experts share them; `task_arithmetic` stands for other methods. Of a recipe, methods for whole models (`linear`,
`slerp`) may name no base; then nothing is measured that needs one.
"""


def default(value: object) -> str:
    """A default as `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def defaults(entry: MergeMethod) -> dict[str, object]:
    """What a method's settings are if nobody says."""
    return {name: field.default for name, field in settings_of(entry.function).model_fields.items()}


def cost(entry: MergeMethod) -> str:
    """What a method takes besides one reading of the files."""
    settings = defaults(entry)
    found = []
    if entry.held(EXPERTS):
        found.append(f"{entry.held(EXPERTS)} whole models in float32")
    if entry.reads_moments:
        found.append(f"{SAMPLES} forward passes a task, Gram matrices of one layer")
    if entry.reads == "samples":
        found.append(f"{entry.runs(settings, SAMPLES, CLASSES):,} forward and backward passes a task")
    return "; ".join(found) or "–"


def page() -> str:
    """The document."""
    lines = [["method", "title", "paper", "reads", "needs", "defaults", "cost"], ["---"] * 7]
    for name, entry in sorted(merge_methods.items()):
        needs = {"base": entry.needs_base, "samples": entry.runs_models, "score maps": entry.scores}
        rest = "" if not entry.reads_sites else f"; all else {own(entry)}"
        settings = [f"`{name}={default(value)}`" for name, value in defaults(entry).items()]
        lines.append(
            [
                f"`{name}`",
                entry.title,
                paper(entry.source),
                READS[entry.reads] + rest,
                ", ".join(what for what, is_needed in needs.items() if is_needed) or "–",
                " ".join(settings) or "–",
                cost(entry),
            ]
        )
    text = HEAD + table(lines) + "\n## Which method, when\n\n"
    rows = [
        [what, ", ".join(f"`{name}`" for name, entry in sorted(merge_methods.items()) if fits(entry))]
        for what, fits in WHEN.items()
    ]
    return text + table([["what there is, or is wanted", "methods"], ["---"] * 2, *rows]) + ANCHOR


def own(entry: MergeMethod) -> str:
    """Whose rule what is no linear module follows."""
    return "by its own rule" if merge_methods.get(entry.others) is entry else f"by `{entry.others}`"


def paper(source: str) -> str:
    """A link to the paper."""
    kind, _, number = source.partition(":")
    places = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
    return f"[{source}]({places[kind]}{number})" if kind in places else source


def table(lines: list[list[str]]) -> str:
    """Rows of Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(page())
