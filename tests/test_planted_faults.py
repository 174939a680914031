"""One-line mutations of the product, each of which a check of this suite must reject.

A check is first run on the product as it is, where it must pass, and then on the mutated one, where it must fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

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
OPEN_CLIP = CASES["open_clip_vit"]


# --- checks -------------------------------------------------------------------------------------------------------


def agrees_with_the_library() -> None:
    """closure_error of contract section 2: the walk's drift against that of ordinary forward passes."""
    models = family(OPEN_CLIP, n=3)
    inputs = models.batches[0].inputs
    native = {name: models.pool.library_states(name, inputs) for name in ("merged", "expert:a")}
    with torch.no_grad():
        for view in walk.walk(models.pool, "a", ["merged"], models.batches):
            boundary = view.layer.index - 1
            ours = view.merged_out["hidden"] - view.expert_out["hidden"]
            theirs = native["merged"][boundary]["hidden"] - native["expert:a"][boundary]["hidden"]
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def jacobian_reproduces_propagation() -> None:
    models = family(OPEN_CLIP, n=3)
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
    models = family(OPEN_CLIP, n=3)
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
    models = family(OPEN_CLIP, n=3)
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
    models = family(OPEN_CLIP, n=3)
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


def transposed_weight(patch: Patch) -> None:
    def linear(parameters, site, x, tap):  # type: ignore[no-untyped-def]
        weight = parameters[f"{site}.weight"]
        weight = weight.T if weight.shape[0] == weight.shape[1] else weight
        return F.linear(x, weight, parameters.get(f"{site}.bias"))

    patch.setattr(vit, "_linear", linear)


def forgotten_bias(patch: Patch) -> None:
    patch.setattr(vit, "_linear", lambda parameters, site, x, tap: F.linear(x, parameters[f"{site}.weight"]))


def layer_off_by_one(patch: Patch) -> None:
    """Every block but the last runs with its successor's weights."""
    chain_of = type(adapters["open_clip_vit"]).chain

    def shifted(self, module):  # type: ignore[no-untyped-def]
        chain = chain_of(self, module)
        stem, *blocks, last = chain.layers
        following = [*blocks[1:], blocks[-1]]
        moved = [
            dataclasses.replace(block, parameters=later.parameters)
            for block, later in zip(blocks, following, strict=True)
        ]
        return dataclasses.replace(chain, layers=(stem, *moved, last))

    patch.setattr(CASES["open_clip_vit"].chain.__self__.__class__, "chain", shifted)
    patch.setitem(
        CASES, "open_clip_vit", dataclasses.replace(OPEN_CLIP, chain=adapters["open_clip_vit"].chain)
    )
    patch.setitem(globals(), "OPEN_CLIP", CASES["open_clip_vit"])


def swapped_queries_and_keys(patch: Patch) -> None:
    original = vit._attention

    def swapped(parameters, normed, names, num_heads, tap):  # type: ignore[no-untyped-def]
        return original(parameters, normed, dataclasses.replace(names, k=names.v, v=names.k), num_heads, tap)

    patch.setattr(vit, "_attention", swapped)


def crossed_output_of_the_wrong_model(patch: Patch) -> None:
    original = walk.decompose
    patch.setattr(
        attribution,
        "decompose",
        lambda view: original(dataclasses.replace(view, crossed_out=view.expert_out)),
    )


def crossed_output_on_the_wrong_input(patch: Patch) -> None:
    original = walk.decompose
    patch.setattr(
        walk, "decompose", lambda view: original(dataclasses.replace(view, crossed_out=view.merged_out))
    )


def mismatch_and_propagation_swapped(patch: Patch) -> None:
    original = walk.decompose

    def swapped(view):  # type: ignore[no-untyped-def]
        split = original(view)
        return walk.Split(split.drift, split.propagation, split.local_mismatch)

    patch.setattr(walk, "decompose", swapped)


def mean_for_sum_in_a_norm(patch: Patch) -> None:
    patch.setattr(walk, "norm", lambda s: next(iter(s.values())).flatten(1).square().mean(dim=1).sqrt())


def last_token_for_the_class_token(patch: Patch) -> None:
    original = chains.pooled
    patch.setattr(chains, "pooled", lambda hidden, how, mask=None: original(hidden, "last", mask))


def quadrature_on_the_wrong_interval(patch: Patch) -> None:
    patch.setattr(
        state,
        "gauss_legendre",
        lambda nodes, original=state.gauss_legendre: [(2 * t - 1, weight) for t, weight in original(nodes)],
    )


def one_point_for_all_nodes(patch: Patch) -> None:
    patch.setattr(
        state,
        "_stacked",
        lambda points, original=state._stacked: original(points[:1] * len(points)),
    )


def mean_left_in_the_norms_derivative(patch: Patch) -> None:
    def careless(vector, z):  # type: ignore[no-untyped-def]
        return vector - z * (z * vector).mean(dim=-1, keepdim=True)

    patch.setattr(fixed_weights, "_without_moments", careless)


def mismatch_not_carried_on(patch: Patch) -> None:
    """The path ends at the expert's input: no drift to average over."""
    original = attribution.PathJacobian
    patch.setattr(
        attribution, "PathJacobian", lambda call, start, end, nodes: original(call, start, start, nodes)
    )


def prefix_off_by_one(patch: Patch) -> None:
    original = attribution.PrefixSwaps.add

    def late(self, view):  # type: ignore[no-untyped-def]
        original(self, view)
        if view.layer.index > 1:
            self.finals[-2] = view.merged_out

    patch.setattr(attribution.PrefixSwaps, "add", late)


def hook_left_behind(patch: Patch) -> None:
    @contextmanager
    def careless(block, path, read):  # type: ignore[no-untyped-def]
        block.register_forward_hook(lambda *_: None)
        yield

    patch.setattr(pool_module, "_streamed_block", careless)


def weights_not_put_back(patch: Patch) -> None:
    @contextmanager
    def careless(module, names, read):  # type: ignore[no-untyped-def]
        for name in names:
            owner = module.get_submodule(name.rpartition(".")[0])
            owner._parameters[name.rpartition(".")[2]] = torch.nn.Parameter(
                read(name) + 1, requires_grad=False
            )
        yield

    patch.setattr(pool_module, "_replaced", careless)


def certificate_without_the_half(patch: Patch) -> None:
    original = output._margin
    patch.setattr(output, "_margin", lambda scores: 4 * original(scores))


def bound_from_the_longest_feature(patch: Patch) -> None:
    original = heads.Head.gain_bound

    def smaller(self, start, end):  # type: ignore[no-untyped-def]
        return original(self, start, end) / (3 * end.norm(dim=1) + 3 * start.norm(dim=1))

    patch.setattr(heads.Head, "gain_bound", smaller)


def mean_of_task_vectors_for_their_sum(patch: Patch) -> None:
    method = merge_methods["task_arithmetic"]

    def averaged(base, experts, *, scaling=0.3):  # type: ignore[no-untyped-def]
        return method.function(base, experts, scaling=scaling / len(experts))

    patch.setitem(merge_methods._entries, "task_arithmetic", dataclasses.replace(method, function=averaged))


def labels_by_position(patch: Patch) -> None:
    patch.setattr(output, "class_rows", lambda head, labels: torch.arange(len(labels)))


def energy_of_one_vector_for_both(patch: Patch) -> None:
    original = task_vectors.Alignment.of.__func__
    patch.setattr(
        task_vectors.Alignment,
        "of",
        classmethod(lambda cls, variant, expert: original(cls, variant, variant)),
    )


def transposed_expert_weight(patch: Patch) -> None:
    original = layer_sums.stacked

    def transposed(parameters, sites):  # type: ignore[no-untyped-def]
        weight = original(parameters, sites)
        return weight.mT if weight.shape[0] == weight.shape[1] else weight

    patch.setattr(layer_sums, "stacked", transposed)


def expert_of_the_next_layer(patch: Patch) -> None:
    original = ModelPool.parameters

    def shifted(self, model, layer):  # type: ignore[no-untyped-def]
        is_moved = model.startswith("expert:") and layer in self.chain.blocks[:-1]
        return original(self, model, self.chain.layers[layer.index] if is_moved else layer)

    patch.setattr(ModelPool, "parameters", shifted)


def anchor_left_out(patch: Patch) -> None:
    patch.setattr(FeatCal, "anchor_of", lambda self, merged, base: None)


def anchor_without_the_base(patch: Patch) -> None:
    original = FeatCal.anchor_of
    patch.setattr(FeatCal, "anchor_of", lambda self, merged, base: original(self, merged, merged))


def mean_over_tasks_for_their_sum(patch: Patch) -> None:
    original = FeatCal.task_weight
    patch.setattr(FeatCal, "task_weight", lambda self, norm: original(self, norm) / 2)


def tasks_not_balanced(patch: Patch) -> None:
    patch.setattr(FeatCal, "task_weight", lambda self, norm: torch.ones_like(norm))


def stale_features(patch: Patch) -> None:
    original = snapshot.SnapshotWalk.advance

    def stale(self, layer, merged, found):  # type: ignore[no-untyped-def]
        return original(self, layer, merged, [({}, reports) for _, reports in found])

    patch.setattr(snapshot.SnapshotWalk, "advance", stale)


def expert_path_replaced(patch: Patch) -> None:
    original = snapshot.SnapshotWalk.advance

    def mixed(self, layer, merged, found):  # type: ignore[no-untyped-def]
        drift = original(self, layer, merged, found)
        for batch in self.passage.all_waiting:
            batch.put("expert", batch.get("merged"))
        return drift

    patch.setattr(snapshot.SnapshotWalk, "advance", mixed)


def target_of_the_expert_alone(patch: Patch) -> None:
    original = layer_sums.OutputCross
    patch.setattr(
        layer_sums,
        "OutputCross",
        lambda weight, bias, **options: original(weight, bias, **{**options, "alpha": 1.0}),
    )


def expert_outputs_with_their_bias(patch: Patch) -> None:
    original = layer_sums._stacked_bias
    patch.setattr(
        layer_sums, "_stacked_bias", lambda parameters, sites: torch.zeros_like(original(parameters, sites))
    )


def norm_of_half_a_matrix(patch: Patch) -> None:
    original = gram.GramSum.norm
    patch.setattr(gram.GramSum, "norm", lambda self: original(self) / 2)


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


def token_weights_counted_twice(patch: Patch) -> None:
    original = layer_sums.row_weights

    def squared(*given):  # type: ignore[no-untyped-def]
        weights = original(*given)
        return None if weights is None else weights.square()

    patch.setattr(layer_sums, "row_weights", squared)


def token_weights_for_keys_too(patch: Patch) -> None:
    original = FeatCal.wants

    def everywhere(self, site, *, in_last_block):  # type: ignore[no-untyped-def]
        return original(self, dataclasses.replace(site, mixes_tokens=False), in_last_block=in_last_block)

    patch.setattr(FeatCal, "wants", everywhere)


Fault = Callable[[Patch], None]
Check = Callable[[], None]
PLANTED: list[tuple[Fault, Check]] = [
    (transposed_weight, agrees_with_the_library),
    (forgotten_bias, agrees_with_the_library),
    (layer_off_by_one, agrees_with_the_library),
    (swapped_queries_and_keys, agrees_with_the_library),
    (crossed_output_of_the_wrong_model, jacobian_reproduces_propagation),
    (quadrature_on_the_wrong_interval, jacobian_reproduces_propagation),
    (one_point_for_all_nodes, jacobian_reproduces_propagation),
    (mean_left_in_the_norms_derivative, jacobian_reproduces_propagation),
    (mismatch_not_carried_on, jacobian_reproduces_propagation),
    (crossed_output_on_the_wrong_input, columns_agree_with_the_slow_reference),
    (mismatch_and_propagation_swapped, columns_agree_with_the_slow_reference),
    (mean_for_sum_in_a_norm, columns_agree_with_the_slow_reference),
    (last_token_for_the_class_token, columns_agree_with_the_slow_reference),
    (prefix_off_by_one, prefixes_are_models_of_two_halves),
    (hook_left_behind, models_are_left_as_they_were),
    (weights_not_put_back, models_are_left_as_they_were),
    (certificate_without_the_half, a_certified_decision_never_flips),
    (bound_from_the_longest_feature, a_certified_decision_never_flips),
    (mean_of_task_vectors_for_their_sum, task_arithmetic_of_one_expert_is_the_expert),
    (labels_by_position, labels_meet_rows_by_name),
    (energy_of_one_vector_for_both, alignment_of_parts_adds_up),
    (transposed_expert_weight, calibration_agrees_with_the_slow_reference),
    (expert_of_the_next_layer, calibration_agrees_with_the_slow_reference),
    (anchor_left_out, calibration_agrees_with_the_slow_reference),
    (anchor_without_the_base, calibration_agrees_with_the_slow_reference),
    (mean_over_tasks_for_their_sum, calibration_agrees_with_the_slow_reference),
    (tasks_not_balanced, calibration_agrees_with_the_slow_reference),
    (stale_features, calibration_agrees_with_the_slow_reference),
    (expert_path_replaced, calibration_agrees_with_the_slow_reference),
    (target_of_the_expert_alone, calibration_agrees_with_the_slow_reference),
    (expert_outputs_with_their_bias, calibration_agrees_with_the_slow_reference),
    (norm_of_half_a_matrix, calibration_agrees_with_the_slow_reference),
    (bias_of_the_merged_weight, calibration_agrees_with_the_slow_reference),
    (token_weights_counted_twice, weighted_calibration_agrees_with_the_slow_reference),
    (token_weights_for_keys_too, weighted_calibration_agrees_with_the_slow_reference),
]


@pytest.mark.parametrize(("fault", "check"), PLANTED, ids=[fault.__name__ for fault, _ in PLANTED])
def test_planted_fault_is_rejected(fault: Fault, check: Check) -> None:
    check()
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            check()
