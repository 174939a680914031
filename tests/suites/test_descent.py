from __future__ import annotations

import torch
from torch import nn

from driftlens.suites.recipe import Schedule
from driftlens.suites.training import LARGEST_GRADIENT, Descent, Muon, orthogonalized


def test_orthogonalizing_keeps_singular_vectors_and_evens_out_singular_values(generator: torch.Generator):
    left, right = (torch.linalg.qr(torch.randn(n, 6, generator=generator)).Q for n in (8, 20))
    values = torch.tensor([4.0, 2.0, 1.0, 0.6, 0.4, 0.3])
    seen = left.T @ orthogonalized(left * values @ right.T) @ right
    assert (seen - torch.diag(seen.diagonal())).abs().max() < 1e-4
    assert ((seen.diagonal() > 0.6) & (seen.diagonal() < 1.3)).all()


def test_a_tall_matrix_is_treated_as_its_transpose(generator: torch.Generator):
    matrix = torch.randn(12, 5, generator=generator)
    torch.testing.assert_close(orthogonalized(matrix), orthogonalized(matrix.T).T)


def test_a_fused_projection_moves_like_its_three_parts(generator: torch.Generator):
    weight, gradient = torch.randn(2, 12, 4, generator=generator)
    fused = nn.Parameter(weight.clone())
    parts = [nn.Parameter(part.clone()) for part in weight.chunk(3)]
    fused.grad = gradient.clone()
    for part, piece in zip(parts, gradient.chunk(3), strict=True):
        part.grad = piece.clone()
    Muon([fused], 0.1, 0.5).step()
    Muon(parts, 0.1, 0.5).step()
    assert not torch.equal(fused, weight)
    torch.testing.assert_close(fused.data, torch.cat([part.data for part in parts]))


def test_a_step_does_not_depend_on_the_size_of_the_gradient(generator: torch.Generator):
    gradient = torch.randn(4, 6, generator=generator)
    moved = []
    for size in (1e-3, 1e3):
        parameter = nn.Parameter(torch.zeros(4, 6))
        parameter.grad = size * gradient
        Muon([parameter], 0.1, 0.0).step()
        moved.append(parameter.data)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-3, atol=1e-5)


class Net(nn.Module):
    """One block matrix, and parameters that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([nn.Linear(3, 3)])
        self.head = nn.Linear(3, 2)


def test_rates_rise_to_their_peak_and_fall_to_nothing():
    schedule = Schedule(steps=100, batch=1, rate=1, warmup=0.1)
    rates = [schedule.share_at(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert 0 < rates[0] < rates[5] < rates[peak] <= 1 and peak in (8, 9, 10)
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-3


def test_every_parameter_moves_and_only_block_matrices_by_a_fixed_amount():
    torch.manual_seed(0)
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.named_parameters()}
    schedule = Schedule(steps=4, batch=1, matrix_rate=0.1, rate=1e-3, weight_decay=0.0, warmup=0.0)
    Descent(net, schedule).step(net.head(net.resblocks[0](torch.randn(5, 3))).square().sum(), 0)
    moved = {name: tensor - before[name] for name, tensor in net.named_parameters()}
    assert all((change != 0).any() for change in moved.values())
    # AdamW's first step is its rate in every coordinate; Muon's has a spectral norm near its own.
    assert moved["head.weight"].abs().max() < 1.01e-3
    assert 0.06 < torch.linalg.matrix_norm(moved["resblocks.0.weight"], ord=2) < 0.13


def test_fine_tuning_moves_along_the_gradient_and_cuts_a_long_one(generator: torch.Generator):
    net = Net()
    x = torch.randn(5, 3, generator=generator)

    def loss() -> torch.Tensor:
        return 1e3 * net.head(net.resblocks[0](x)).square().sum()

    gradients = torch.autograd.grad(loss(), list(net.parameters()))
    size = torch.cat([each.flatten() for each in gradients]).norm()
    assert size > LARGEST_GRADIENT
    before = [each.detach().clone() for each in net.parameters()]
    Descent(net, Schedule(steps=4, batch=1, rate=0.1, warmup=0.0)).step(loss(), 0)
    for start, each, gradient in zip(before, net.parameters(), gradients, strict=True):
        # Nesterov momentum from rest: the first step is (1 + 0.9) times the rate along the cut gradient.
        torch.testing.assert_close(each.data, start - 0.19 * LARGEST_GRADIENT / size * gradient)
