"""Whatever causal language model the installed transformers registers is followed, or refused in words."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from driftlens.base.errors import DriftLensError
from driftlens.checkpoints.refusals import running
from driftlens.models.architecture import weightless
from driftlens.models.families.causal import causal_chain
from driftlens.models.families.hf_auto import built
from driftlens.models.frames import raw_inputs
from driftlens.models.taking_apart.dissection import run
from tests.quick import few
from tests.zoo.every_causal import BATCH, KINDS, in_turn, tiny
from tests.zoo.walking import chain_states, largest_difference

FROM_WEIGHTS = "computed from weights; expected the same for all models"
REFUSED = {
    **dict.fromkeys(("cpmant", "glm_moe_dsa", "hy_v4", "zamba", "zamba2", "zaya"), FROM_WEIGHTS),
    **dict.fromkeys(("deepseek_v4", "xlnet"), "expected one mask entry per token"),
    **dict.fromkeys(("hrm_text", "longcat_flash"), "several lists that could be its blocks"),
    **dict.fromkeys(
        ("inkling2_text", "inkling2_loop_text"), "its scores are not made of its head's output, one by one"
    ),
    **dict.fromkeys(("jetmoe", "qwen4_exp_text", "rwkv"), "can't be used as it is"),
    "dory": "its head is a DoryLMHead; expected a linear map",
}
"""What files of these model types are told; live models of some work."""


@pytest.mark.parametrize("kind", few(KINDS, (), some={*KINDS[::3]}))
def test_it_is_followed_from_files_or_refused_in_words(kind: str) -> None:
    model = tiny(kind)
    shell = weightless(partial(built, type(model), copy.deepcopy(model.config)), kind)
    in_turn(shell)
    try:
        with running(kind):
            chain, _ = causal_chain(shell, BATCH)
    except DriftLensError as error:
        assert kind in REFUSED and REFUSED[kind] in error.message and error.hint, error
        return
    assert kind not in REFUSED, "it works"
    with torch.no_grad():
        wanted = chain.library_states(model, BATCH)
        gap = largest_difference(chain_states(chain, model, BATCH), wanted)
        # What the library's head makes of the last features is what the library says.
        head = model.get_output_embeddings()
        read: list[torch.Tensor] = []
        hook = head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        with hook:
            run(model, raw_inputs(BATCH))
    assert gap <= 1e-9 * max(float(leaf.abs().max()) for leaf in wanted[-1].values())
    real = BATCH["attention_mask"].bool()
    final = wanted[-1]["hidden"]
    torch.testing.assert_close(final[real], read[0][real], rtol=1e-6, atol=1e-9)
