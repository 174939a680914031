"""Encoders of transformers: BERT, RoBERTa, DistilBERT, DeBERTa; their heads are the experts' own, whatever they hold.

All that a model for classification has behind the features of its tokens, BERT's pooler included, is its head: it is
merged with no other, and tasks are scored with that of their expert. Final features are those of tokens; of samples
they are taken as heads read them, the class token, or else as masked means.
"""

from __future__ import annotations

from driftlens.checkpoints.refusals import ENCODERS
from driftlens.models.architecture import Architecture, ArchitectureRequest, loaders
from driftlens.models.families.hf_auto import load_transformers


@loaders.register("hf-encoder")
def load_hf_encoder(request: ArchitectureRequest) -> Architecture:
    """The architecture of an encoder of texts, with or without a classifier.

    Raises:
        DriftLensError: as for `load_hf_auto`, and for any other model.
    """
    return load_transformers(request, "hf-encoder", ENCODERS, whole_heads=True)
