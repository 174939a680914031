"""What the numbers can't tell, and what may have spoilt them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.content import Figure
from driftlens_reports.wording import percent

_ALWAYS = (
    "Means hide the worst case; the tables name every task.",
    "Drift and cosine compare features with the expert's. A gain in cosine is a diagnostic, not an explanation of "
    "a gain in accuracy.",
)
_FEW = 30


def caveat_sentences(run: DriftRun, figures: Sequence[Figure]) -> list[str]:
    """The run's own warnings and notices first, then what its numbers leave open.

    Args:
        run: the run.
        figures: all figures of the report; those that are missing are named.
    """
    manifest = run.manifest
    own = [f"Warning: {text}." for text in manifest.warnings] + [
        f"Notice: {text}." for text in manifest.notices
    ]
    missing = [figure.title for figure in figures if figure.missing]
    unmeasured = [f"Not measured, so not shown: {'; '.join(missing)}."] if missing else []
    return [_ended(text) for text in (*own, *_measured(run), *_ALWAYS, *unmeasured)]


def _ended(sentence: str) -> str:
    return f"{sentence.rstrip('.')}."


def _measured(run: DriftRun) -> Iterator[str]:
    rows = run.layers()
    counts = rows["n"].dropna()
    if len(counts) and counts.min() < _FEW:
        yield f"Some rows rest on {int(counts.min())} samples only"
    jacobian = rows[rows["jacobian_samples"].notna() & rows["n"].notna()]
    if len(jacobian) and (jacobian["jacobian_samples"] < jacobian["n"]).any():
        low, high = int(jacobian["jacobian_samples"].min()), int(jacobian["n"].max())
        yield f"What needs the Jacobian rests on as few as {low} of up to {high} samples"
    remainder = rows["remainder_share"].astype(float).abs()
    if remainder.notna().any():
        worst = rows.iloc[int(remainder.fillna(0).to_numpy().argmax())]
        yield (
            f"Up to {percent(float(remainder.max()))} of a final drift belongs to no layer "
            f"({worst['task']}, {worst['variant']}): the remainder of the quadrature"
        )
    references = rows["reference"].dropna().unique()
    if len(references):
        yield (
            f"Local mismatch is taken on the features of: {', '.join(references)}. The other split of the drift has "
            "other parts with the same sum"
        )
    if not run.accuracy()["value"].notna().any():
        yield "No accuracy was measured, so nothing here says what the drift costs on the task"
    if len(run.tasks) == 1:
        yield "There is one task, so nothing here says how the model does on others"
