"""One-line mutations of the product, each of which a check of this suite must reject.

A check is first run on the product as it is, where it must pass, and then on the mutated one, where it must fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.calibration import solves
from driftlens.calibration.featcal import FeatCal
from driftlens.diagnostics import attribution, output, task_vectors
from driftlens.engine import layer_sums, snapshot, walk
from driftlens.engine import pool as pool_module
from driftlens.engine.pool import ModelPool
from driftlens.linalg import fixed_weights, gram, state
from driftlens.merging.method import merge_methods
from driftlens.models import chain as chains
from driftlens.models import heads
from driftlens.models.chain import adapters
from driftlens.models.families import vit
from tests.calibration import test_reference as calibration
from tests.diagnostics.heads import head
from tests.reference.drift import STEPS, drift_rows
from tests.zoo.cases import CASES, family

Patch = pytest.MonkeyPatch


# --- checks -------------------------------------------------------------------------------------------------------


def agrees_with_the_library() -> None:
    """closure_error of contract section 2: the walk's drift against that of ordinary forward passes."""
    models = family(CASES["open_clip_vit"], n=3)
    inputs = models.batches[0].inputs
    native = {name: models.pool.library_states(name, inputs) for name in ("merged", "expert:a")}
    with torch.no_grad():
        for view in walk.walk(models.pool, "a", ["merged"], models.batches):
            boundary = view.layer.index - 1
            ours = view.merged_out["hidden"] - view.expert_out["hidden"]
            theirs = native["merged"][boundary]["hidden"] - native["expert:a"][boundary]["hidden"]
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def jacobian_reproduces_propagation() -> None:
    models = family(CASES["open_clip_vit"], n=3)
    settings = attribution.JacobianSettings(nodes=16, max_nodes=16)
    contributions = attribution.Contributions(settings)
    with torch.no_grad():
        for view in walk.walk(models.pool, "a", ["merged"], models.batches):
            contributions.add(view)
    for found in contributions.sensitivities.values():
        assert float(found.error.sum() / found.size.sum()) < 1e-6
    drift_norm = state.norm(contributions.final_drift)
    assert float((state.norm(contributions.remainder()) / drift_norm).max()) < 1e-5


def prefixes_are_models_of_two_halves() -> None:
    models = family(CASES["open_clip_vit"], n=3)
    swaps = attribution.PrefixSwaps()
    with torch.no_grad():
        for view in walk.walk(models.pool, "a", ["merged"], models.batches):
            swaps.add(view)
        for prefix, found in enumerate(swaps.finals):
            hidden, side = models.chain.start(models.batches[0].inputs)
            for layer in models.chain.layers:
                model = "expert:a" if layer.index <= prefix else "merged"
                hidden = layer.call(models.pool.parameters(model, layer), hidden, side)
            torch.testing.assert_close(found["hidden"], hidden["hidden"], rtol=1e-9, atol=1e-11)


def columns_agree_with_the_slow_reference() -> None:
    models = family(CASES["open_clip_vit"], n=3)
    steps = STEPS["open_clip_vit"]
    rows = drift_rows(
        steps(models.modules["merged"]), steps(models.modules["expert:a"]), models.batches[0].inputs
    )
    with torch.no_grad():
        for view in walk.walk(models.pool, "a", ["merged"], models.batches):
            columns = walk.drift_columns(view, "cls")
            for sample, layers in enumerate(rows):
                row = layers[view.layer.index - 1]
                wanted = [row.drift.norm(), row.mismatch.norm(), row.propagation.norm()]
                found = [columns[name][sample] for name in ("drift_l2", "mismatch_l2", "propagation_l2")]
                torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-9, atol=1e-11)
                assert float(columns["state_propagation"][sample]) == pytest.approx(
                    row.state_propagation, rel=1e-9
                )


def models_are_left_as_they_were() -> None:
    models = family(CASES["open_clip_vit"], n=3)
    before = {name: {k: v.clone() for k, v in m.state_dict().items()} for name, m in models.modules.items()}
    skeleton = models.modules["base"]
    with pool_module.streamed_weights(
        skeleton,
        [layer.path for layer in models.chain.blocks],
        models.pool.source("merged").read,
        torch.device("cpu"),
    ):
        skeleton(models.batches[0].inputs)
    for name, module in models.modules.items():
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
        assert all(torch.equal(value, before[name][key]) for key, value in module.state_dict().items())


def a_certified_decision_never_flips() -> None:
    generator = torch.Generator().manual_seed(0)
    expert = torch.randn(4000, 7, generator=generator, dtype=torch.float64)
    variant = expert + 0.3 * torch.randn(4000, 7, generator=generator, dtype=torch.float64)
    found = output.output_columns(head(), expert, variant, None)
    assert found["certified"].any()
    assert not (found["certified"] & found["flipped"]).any()
    assert (found["score_drift_l2"] <= found["score_bound"] * (1 + 1e-9)).all()


def task_arithmetic_of_one_expert_is_the_expert() -> None:
    base, expert = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -1.0])}
    merged = merge_methods["task_arithmetic"].function(base, {"a": expert, "b": base}, scaling=1.0)
    torch.testing.assert_close(merged["w"], expert["w"])


def labels_meet_rows_by_name() -> None:
    assert output.class_rows(head(classes=3), ["c2", "c0"]).tolist() == [2, 0]


def alignment_of_parts_adds_up() -> None:
    left, right = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = task_vectors.Alignment.of(left[:2], right[:2]) + task_vectors.Alignment.of(left[2:], right[2:])
    assert parts.values()["cos"] == pytest.approx(float(F.cosine_similarity(left, right, dim=0)))


def calibration_agrees_with_the_slow_reference() -> None:
    calibration.test_every_architecture_agrees_with_the_slow_reference("hf_clip_vit", torch.device("cpu"))


def weighted_calibration_agrees_with_the_slow_reference() -> None:
    calibration.test_the_authors_token_weights_agree_with_the_slow_reference(torch.device("cpu"))


# --- faults -------------------------------------------------------------------------------------------------------


def transposed(weight: Tensor) -> Tensor:
    return weight.mT if weight.shape[0] == weight.shape[1] else weight


def layer_off_by_one(patch: Patch) -> None:
    """Every block but the last runs with its successor's weights."""
    adapter = type(adapters["open_clip_vit"])
    chain_of = adapter.chain

    def shifted(self, module):  # type: ignore[no-untyped-def]
        chain = chain_of(self, module)
        stem, *blocks, last = chain.layers
        pairs = zip(blocks, [*blocks[1:], blocks[-1]], strict=True)
        moved = [dataclasses.replace(block, parameters=later.parameters) for block, later in pairs]
        return dataclasses.replace(chain, layers=(stem, *moved, last))

    patch.setattr(adapter, "chain", shifted)
    case = dataclasses.replace(CASES["open_clip_vit"], chain=adapters["open_clip_vit"].chain)
    patch.setitem(CASES, "open_clip_vit", case)


@contextmanager
def hook_left_behind(block, path, read):  # type: ignore[no-untyped-def]
    block.register_forward_hook(lambda *_: None)
    yield


@contextmanager
def weights_not_put_back(module, names, read):  # type: ignore[no-untyped-def]
    for name in names:
        owner, _, key = name.rpartition(".")
        wrong = torch.nn.Parameter(read(name) + 1, requires_grad=False)
        module.get_submodule(owner)._parameters[key] = wrong
    yield


def mean_of_task_vectors_for_their_sum(patch: Patch) -> None:
    method = merge_methods["task_arithmetic"]

    def averaged(base, experts, *, scaling=0.3):  # type: ignore[no-untyped-def]
        return method.function(base, experts, scaling=scaling / len(experts))

    patch.setitem(merge_methods._entries, "task_arithmetic", dataclasses.replace(method, function=averaged))


def late_prefixes(original: Any) -> Any:
    def late(self, view):  # type: ignore[no-untyped-def]
        original(self, view)
        if view.layer.index > 1:
            self.finals[-2] = view.merged_out

    return late


def expert_of_the_next_layer(original: Any) -> Any:
    def shifted(self, model, layer):  # type: ignore[no-untyped-def]
        is_moved = model.startswith("expert:") and layer in self.chain.blocks[:-1]
        return original(self, model, self.chain.layers[layer.index] if is_moved else layer)

    return shifted


def expert_path_replaced(original: Any) -> Any:
    def mixed(self, layer, merged, found):  # type: ignore[no-untyped-def]
        drift = original(self, layer, merged, found)
        for batch in self.passage.all_waiting:
            batch.put("expert", batch.get("merged"))
        return drift

    return mixed


def bias_of_the_merged_weight(patch: Patch) -> None:
    of, original = solves._Weights.of, solves.solve_bias
    outputs = []

    def noted(moments, merged, *rest):  # type: ignore[no-untyped-def]
        outputs.append(merged.to(moments.gram) @ moments.mean_in)
        return of(moments, merged, *rest)

    def late(target, output, *rest, **more):  # type: ignore[no-untyped-def]
        return original(target, outputs[-1], *rest, **more)

    patch.setattr(solves._Weights, "of", noted)
    patch.setattr(solves, "solve_bias", late)


def token_weights_counted_twice(original: Any) -> Any:
    def squared(*given):  # type: ignore[no-untyped-def]
        weights = original(*given)
        return None if weights is None else weights.square()

    return squared


Check = Callable[[], None]
Fault = tuple[Any, str, Callable[[Any], Any]] | Callable[[Patch], None]
"""Whose attribute, its name, and original -> what takes its place; or what patches more than one."""
PLANTED: dict[Check, dict[str, Fault]] = {
    agrees_with_the_library: {
        "transposed weight": (
            vit,
            "_linear",
            lambda _: (
                lambda parameters, site, x, tap: F.linear(
                    x, transposed(parameters[f"{site}.weight"]), parameters.get(f"{site}.bias")
                )
            ),
        ),
        "forgotten bias": (
            vit,
            "_linear",
            lambda _: lambda parameters, site, x, tap: F.linear(x, parameters[f"{site}.weight"]),
        ),
        "layer off by one": layer_off_by_one,
        "swapped keys and values": (
            vit,
            "_attention",
            lambda original: (
                lambda parameters, normed, names, *rest: original(
                    parameters, normed, dataclasses.replace(names, k=names.v, v=names.k), *rest
                )
            ),
        ),
    },
    jacobian_reproduces_propagation: {
        "crossed output of the wrong model": (
            attribution,
            "decompose",
            lambda original: lambda view: original(dataclasses.replace(view, crossed_out=view.expert_out)),
        ),
        "quadrature on the wrong interval": (
            state,
            "gauss_legendre",
            lambda original: lambda nodes: [(2 * t - 1, weight) for t, weight in original(nodes)],
        ),
        "one point for all nodes": (
            state,
            "_stacked",
            lambda original: lambda points: original(points[:1] * len(points)),
        ),
        "mean left in the norm's derivative": (
            fixed_weights,
            "_without_moments",
            lambda _: lambda vector, z: vector - z * (z * vector).mean(dim=-1, keepdim=True),
        ),
        "path that ends at the expert's input": (
            attribution,
            "PathJacobian",
            lambda original: lambda call, start, end, nodes: original(call, start, start, nodes),
        ),
    },
    columns_agree_with_the_slow_reference: {
        "crossed output on the wrong input": (
            walk,
            "decompose",
            lambda original: lambda view: original(dataclasses.replace(view, crossed_out=view.merged_out)),
        ),
        "mismatch and propagation swapped": (
            walk,
            "decompose",
            lambda original: (
                lambda view: (lambda split: walk.Split(split.drift, split.propagation, split.local_mismatch))(
                    original(view)
                )
            ),
        ),
        "mean for sum in a norm": (
            walk,
            "norm",
            lambda _: lambda hidden: next(iter(hidden.values())).flatten(1).square().mean(dim=1).sqrt(),
        ),
        "last token for the class token": (
            chains,
            "pooled",
            lambda original: lambda hidden, how, mask=None: original(hidden, "last", mask),
        ),
    },
    prefixes_are_models_of_two_halves: {
        "prefix off by one": (attribution.PrefixSwaps, "add", late_prefixes),
    },
    models_are_left_as_they_were: {
        "hook left behind": (pool_module, "_streamed_block", lambda _: hook_left_behind),
        "weights not put back": (pool_module, "_replaced", lambda _: weights_not_put_back),
    },
    a_certified_decision_never_flips: {
        "certificate without the half": (
            output,
            "_margin",
            lambda original: lambda scores: 4 * original(scores),
        ),
        "bound from the longest feature": (
            heads.Head,
            "gain_bound",
            lambda original: (
                lambda self, start, end: (
                    original(self, start, end) / (3 * end.norm(dim=1) + 3 * start.norm(dim=1))
                )
            ),
        ),
    },
    task_arithmetic_of_one_expert_is_the_expert: {
        "mean of task vectors for their sum": mean_of_task_vectors_for_their_sum
    },
    labels_meet_rows_by_name: {
        "labels by position": (
            output,
            "class_rows",
            lambda _: lambda head, labels: torch.arange(len(labels)),
        ),
    },
    alignment_of_parts_adds_up: {
        "energy of one vector for both": (
            task_vectors.Alignment,
            "of",
            lambda original: lambda variant, expert: original(variant, variant),
        ),
    },
    calibration_agrees_with_the_slow_reference: {
        "transposed expert weight": (
            layer_sums,
            "stacked",
            lambda original: lambda parameters, sites: transposed(original(parameters, sites)),
        ),
        "expert of the next layer": (ModelPool, "parameters", expert_of_the_next_layer),
        "anchor left out": (FeatCal, "anchor_of", lambda _: lambda self, merged, base: None),
        "anchor without the base": (
            FeatCal,
            "anchor_of",
            lambda original: lambda self, merged, base: original(self, merged, merged),
        ),
        "mean over tasks for their sum": (
            FeatCal,
            "task_weight",
            lambda original: lambda self, norm: original(self, norm) / 2,
        ),
        "tasks not balanced": (FeatCal, "task_weight", lambda _: lambda self, norm: torch.ones_like(norm)),
        "stale features": (
            snapshot.SnapshotWalk,
            "advance",
            lambda original: (
                lambda self, layer, merged, found: original(
                    self, layer, merged, [({}, reports) for _, reports in found]
                )
            ),
        ),
        "expert path replaced": (snapshot.SnapshotWalk, "advance", expert_path_replaced),
        "target of the expert alone": (
            layer_sums,
            "OutputCross",
            lambda original: (
                lambda weight, bias, **options: original(weight, bias, **{**options, "alpha": 1.0})
            ),
        ),
        "expert outputs with their bias": (
            layer_sums,
            "_stacked_bias",
            lambda original: lambda parameters, sites: torch.zeros_like(original(parameters, sites)),
        ),
        "norm of half a matrix": (gram.GramSum, "norm", lambda original: lambda self: original(self) / 2),
        "bias of the merged weight": bias_of_the_merged_weight,
    },
    weighted_calibration_agrees_with_the_slow_reference: {
        "token weights counted twice": (layer_sums, "row_weights", token_weights_counted_twice),
        "token weights for keys too": (
            FeatCal,
            "wants",
            lambda original: (
                lambda self, site, *, in_last_block: original(
                    self, dataclasses.replace(site, mixes_tokens=False), in_last_block=in_last_block
                )
            ),
        ),
    },
}


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        pytest.param(check, fault, id=name)
        for check, faults in PLANTED.items()
        for name, fault in faults.items()
    ],
)
def test_planted_fault_is_rejected(check: Check, fault: Fault) -> None:
    check()
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(fault, tuple):
            owner, name, replaced = fault
            patch.setattr(owner, name, replaced(getattr(owner, name)))
        else:
            fault(patch)
        with pytest.raises(AssertionError):
            check()
