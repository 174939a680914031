"""The page of merge methods: made of what their registry says of each.

    python -m tests.mergers > docs/mergers.md

`test_mergers.py` fails where the file says something else.
"""

from __future__ import annotations

import sys
from pathlib import Path

from driftlens.merging.method import READS, MergeMethod, merge_methods
from driftlens.utils.registry import settings_model

FILE = Path(__file__).resolve().parents[1] / "docs" / "mergers.md"
EXPERTS, SAMPLES, CLASSES = 8, 64, 10

HEAD = f"""# Merge methods

Made from the registry by `python -m tests.mergers`. In a spec: `merge: {{method: ties, scaling: 0.4}}`. To a folder:
`driftlens merge SPEC --method ties --set scaling=0.4 --out FOLDER`. Defaults are published values; where a paper
searches a setting with labels, the default is a middle value of its range. WUDI's published learning rate is absolute;
by default the rate follows the size of the task vectors. Costs are for {EXPERTS} experts, {SAMPLES} samples per task
and {CLASSES} classes, in addition to reading every file once.

"""

WHEN = {
    "No base": lambda entry: not entry.needs_base,
    "Only weights, no data": lambda entry: not entry.needs_samples,
    "Calibration samples without labels": lambda entry: entry.needs_samples and not entry.scores,
    "Samples without labels, and a score map of every task": lambda entry: entry.scores,
    "A strength to vary on a straight line from the base": lambda entry: (
        {"affine_in_scaling", "zero_scaling_is_base"} <= entry.laws
    ),
    "The least memory: pieces of a tensor at a time": lambda entry: entry.reads == "entry",
    "Queries, keys and values as matrices of their own": lambda entry: entry.is_per_module,
}
"""What somebody has or wants, and which methods are for it: read off the registry and the laws that tests check."""

ANCHOR = """
`driftlens merge SPEC --compare all` ranks methods on your models without labels, by the expected disagreement with
the experts and by final drift, with intervals, on calibration samples that no method has read.

## Anchors

FeatCal pulls towards the anchor base + rho (merged - base). For methods on a straight line from the base this is the
same method with rho times the scaling. Each calibration with rho other than 1 measures its anchor as a control.

## Reproducibility

A merge is computed with one thread, so weights are bit-identical for any number of cores. File formats and fused or
separate weights do not matter either. Random masks (`dare`, `ties` with `drop_rate`) depend on seed, task, parameter
and position only; mergekit draws other masks.

## Recipes of mergekit

`driftlens why recipe.yml merged/` reads base and experts from the recipe and diagnoses `merged/`; without `merged/` it
runs `mergekit-yaml`. `driftlens init recipe.yml` writes a spec with the corresponding method: `ties`, `dare_linear`,
`dare_ties`, `task_arithmetic`, `linear`, `slerp` and `model_stock` have one; `task_arithmetic` replaces all others.
"""


def default(value: object) -> str:
    """A default as `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def defaults(entry: MergeMethod) -> dict[str, object]:
    """What a method's settings are if nobody says."""
    return {name: field.default for name, field in settings_model(entry.function).model_fields.items()}


def cost(entry: MergeMethod) -> str:
    """What a method takes besides one reading of the files."""
    settings = defaults(entry)
    found = []
    if entry.held(EXPERTS):
        found.append(f"{entry.held(EXPERTS)} whole models in float32")
    if entry.needs_moments:
        found.append(f"{SAMPLES} forward passes a task, Gram matrices of one layer")
    if entry.reads == "samples":
        found.append(f"{entry.runs(settings, SAMPLES, CLASSES):,} forward and backward passes a task")
    return "; ".join(found) or "–"


def page() -> str:
    """The document."""
    lines = [["method", "title", "paper", "reads", "needs", "defaults", "cost"], ["---"] * 7]
    for name, entry in sorted(merge_methods.items()):
        needs = {"base": entry.needs_base, "samples": entry.needs_samples, "score maps": entry.scores}
        rest = "" if not entry.is_per_module else f"; all else {own(entry)}"
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
