"""Weights that stand in two places."""

from __future__ import annotations

import dataclasses

from driftlens.jobs.preflight.job import check_ties
from driftlens.jobs.preflight.outcome import Preflight
from tests.zoo.cases import CASES, family


def test_a_tower_has_no_ties_not_even_in_its_fused_projection() -> None:
    collect = Preflight()
    check_ties(family(CASES["open_clip_vit"]).pool.chain, collect)
    assert [(finding.level, finding.subject) for finding in collect.findings] == [("ok", "ties")]


def test_a_weight_in_two_layers_is_named_with_both_places() -> None:
    chain = family(CASES["open_clip_vit"]).pool.chain
    first, second = chain.layers[1:3]
    name = next(iter(first.parameters))
    shared = dataclasses.replace(second, parameters={**second.parameters, name: first.parameters[name]})
    collect = Preflight()
    check_ties(dataclasses.replace(chain, layers=(*chain.layers[:2], shared, *chain.layers[3:])), collect)
    (finding,) = collect.findings
    assert finding.level == "notice"
    assert f"{name} of layer 2 and {name} of layer 3" in finding.text
