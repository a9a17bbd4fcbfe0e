"""Random EAGLE-3 heads for tiny targets, and what such a head drafts by the plain network over a whole text: features
of `transformers`, every pair computed anew, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.engine.eagle.network import EagleConfig, EagleHead
from tests.support.engine_models import OUTPUT_PADDING, model_class

LAYERS = (0, 2, 3)  # of three: entering the first and the last, and after that
DRAFT_STEP = 3  # every third id is in the draft vocabulary


def random_head(
    seed: int = 0,
    hidden_size: int = 64,
    vocabulary_size: int = 288,
    norm_before_residual: bool = False,
    has_embeddings: bool = False,
    **sizes: int,
) -> EagleHead:
    """A head for a tiny target, with weights of a size that makes its tokens vary."""
    ids = torch.arange(0, vocabulary_size, DRAFT_STEP) + torch.arange(len(range(0, vocabulary_size, DRAFT_STEP))) % 2
    config = EagleConfig(
        hidden_size=hidden_size,
        target_hidden_size=64,
        aux_layer_ids=LAYERS,
        head_count=4,
        kv_head_count=2,
        head_size=16,
        intermediate_size=96,
        activation="silu",
        norm_epsilon=1e-5,
        rope_theta=5000.0,
        vocabulary_size=vocabulary_size + OUTPUT_PADDING,
        draft_vocabulary_size=len(ids),
        norm_before_residual=norm_before_residual,
        positions_max=512,
    )
    head = EagleHead(config, ids, has_embeddings).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        is_norm = weight.dim() == 1
        scale = 4.0 if name == "lm_head.weight" else 1.5
        weight.copy_(1 + 0.3 * drawn if is_norm else drawn * scale / weight.shape[1] ** 0.5)
    return head


@torch.inference_mode()
def features_of(folder: Path, architecture: str, token_ids: Sequence[int]) -> Tensor:
    """The residuals that `transformers` has in float32 before each of LAYERS.  # [tokens, layers * hidden]"""
    model = model_class(architecture).from_pretrained(folder, dtype=torch.float32).eval()
    names = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
    norm = next(child for name, child in model.base_model.named_children() if name in names)
    last: list[Tensor] = []
    norm.register_forward_pre_hook(lambda module, arguments: last.append(arguments[0][0]))
    states = model.base_model(torch.tensor([[*token_ids]]), output_hidden_states=True).hidden_states
    return torch.cat([*(states[layer][0] for layer in LAYERS[:-1]), last[0]], -1)


class WholeText:
    """A head on a target's text, computed as a whole at every call."""

    def __init__(self, folder: Path, architecture: str, head: EagleHead) -> None:
        self._folder, self._architecture, self._head = folder, architecture, head
        table = model_class(architecture).from_pretrained(folder, dtype=torch.float32).get_input_embeddings().weight
        self._table = table.detach() if head.embed_tokens is None else head.embed_tokens.weight
        self._features: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logits(self, text: Sequence[int], path: Sequence[int] = (), vocabulary_size: int = 288) -> Tensor:
        """Logits after the text and then the tokens of a path, whose pairs read the head's own x.  # [vocabulary]"""
        key = tuple(text)
        if key not in self._features:
            self._features[key] = self._head.fc(features_of(self._folder, self._architecture, text))
        features = self._features[key][: len(text) - 1]
        tokens = [*text[1:]]
        for token_id in (*path, None):
            embeddings = self._table[torch.tensor(tokens)]
            x = self._head(features[None], embeddings[None], torch.arange(len(tokens)))[0]
            if token_id is None:
                break
            features, tokens = torch.cat([features, x[-1:]]), [*tokens, token_id]
        logits = self._head.logits(x[-1])
        return torch.full((vocabulary_size,), -torch.inf).index_copy_(0, self._head.target_ids, logits)
