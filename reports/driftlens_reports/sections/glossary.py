"""The words of a report, with the paper's symbols."""

from __future__ import annotations

from driftlens_reports.content import Table
from driftlens_reports.sections.tabulate import table

_TERMS = """
base | W_base | The model that every expert was fine-tuned from.
expert | W_i | The model fine-tuned on one task.
merged | W_mer | One model made from the weights of all experts.
calibrated | W_cal | The merged model after calibration.
anchor only | W_anc | The anchor of a calibration by itself: what rescaling does without calibrating.
layer | l | One step of the model in forward order: 1 the stem, then the blocks, last the head.
drift | e | Feature of a model minus the expert's, for the same sample, leaving a layer.
final drift | e_L | Drift leaving the head.
relative drift |  | Norm of the drift against the norm of the expert's feature, sums over samples.
of base distance |  | Norm of the drift against the distance from base to expert; 100 %: as far as the base.
local mismatch | m | What a layer adds: merged layer minus expert layer, both on the expert's input.
propagation | p | What a layer passes on: merged layer on the merged input minus on the expert's. e = m + p.
cross term |  | 2 <m, p> / |e|^2: positive where mismatch and propagation add up, negative where they cancel.
amplification | |p| / |e_in| | Norm of the propagation against that of the incoming drift.
path-averaged Jacobian | A | The merged layer's Jacobian, averaged from expert to merged input; p = A e_in.
growth condition | gamma > eta | Amplification minus 1 exceeds mismatch against incoming drift: it must grow.
share of the final drift | P m_l | A layer's mismatch carried to the end, along the final drift; signed.
remainder |  | Share of the final drift that belongs to no layer: quadrature error.
closure error |  | Drift here against that of ordinary forward passes of the models in their own library.
Jacobian error |  | |p - A e_in| / |p|: how far the numbers are from an identity that is exact in theory.
task vector | tau | Weights minus the base's.
margin | mu | The expert's best score minus its second best.
certified |  | A decision that the drift is too small to flip, by its margin.
flipped |  | A decision that differs from the expert's.
95 % interval |  | Wilson interval of a share of test samples.
"""
"""A line per term, in the order in which a reader meets them: the term, its symbol, its meaning."""


def glossary_table() -> Table:
    """The terms."""
    terms = [[part.strip() for part in line.split(" | ")] for line in _TERMS.strip().splitlines()]
    return table("glossary", "Terms", {"term": "text", "symbol": "text", "meaning": "text"}, terms)
