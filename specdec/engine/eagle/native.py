"""A pass of an EAGLE-3 head as one native call: `sd_step` of a model of one layer with second inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.engine.cpu import structs
from specdec.engine.cpu.arguments import TYPES, LayerCache, Norm, Rows, ScoreRule, WeightPanels
from specdec.engine.cpu.kernels import ACTIVATIONS, Kernels
from specdec.engine.cpu.plan import RowArrays
from specdec.engine.cpu.step_arguments import ChainArguments, StepArguments, StepModel
from specdec.engine.cpu.storage import CpuStorage
from specdec.engine.eagle.network import EagleHead, Layer
from specdec.engine.eagle.pairs import Chain, DraftedChain, PairChunk, PassResult, plan_pairs
from specdec.engine.packed import GROUP_STEP, PackedWeight

GROUP = 64  # inputs of a scale
LARGEST = 127
AFTER_LAYER = 1  # the features that enter the layer behind the only one


def packed(weight: Tensor) -> PackedWeight | Tensor:
    """Returns a weight [out, in] in integers of 8 bits, or as it is where its inputs make no groups. A head's bits
    decide no text, and a pass takes the time to read its weights."""
    group = math.gcd(weight.shape[1], GROUP)
    if group % GROUP_STEP:
        return weight
    groups = weight.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(-1).clamp_(min=torch.finfo(torch.float32).tiny) / LARGEST
    values = (groups / scales[..., None]).round_().to(torch.int8).flatten(1)
    return PackedWeight(8, group, values, scales)


class KernelPass:
    """Passes of a head on the kernels, in a target's type. One thread at a time."""

    def __init__(
        self,
        kernels: Kernels,
        head: EagleHead,
        table: Tensor | WeightPanels,
        dtype: torch.dtype,
        positions_max: int,
        is_packed: bool,
    ) -> None:
        """table: second inputs of the target's tokens; `is_packed`: weights are rounded to 8 bits."""
        self._kernels, self._dtype, self._is_packed = kernels, dtype, is_packed
        self._table, self._columns = table, head.target_ids
        self._config = config = head.config
        layer = head.layer
        self._fc, output = self._panels(head.fc.weight), self._panels(head.lm_head.weight)
        hidden, second, mlp, last = (
            self._norm(module)
            for module in (layer.hidden_norm, layer.input_layernorm, layer.post_attention_layernorm, head.norm)
        )
        self._before = hidden if config.norm_before_residual else None  # applied before the call
        self._layers = (structs.LayerStruct * 1)()
        kept = self._fill(layer)
        if self._before is None:
            self._layers[0].before_attention = hidden.struct
        self._layers[0].before_mlp = mlp.struct
        angles = [each.flatten(0, -2).contiguous() for each in head.rotary(torch.arange(positions_max), dtype)]
        self._layers[0].cosines, self._layers[0].sines = (each.data_ptr() for each in angles)
        self._struct = structs.ModelStruct(
            layers=self._layers,
            layer_count=1,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.head_count,
            kv_heads=config.kv_head_count,
            head_size=config.head_size,
            rotated_size=config.head_size,
            activation=ACTIVATIONS[config.activation],
            type=TYPES[dtype],
            embedding_scale=1.0,
            residual_scale=1.0,
            second=second.struct,
            last=last.struct,
            output=output.struct,
            logit_scale=1.0,
            vocabulary_size=config.vocabulary_size,
            positions_max=positions_max,
        )
        self._kept = (*kept, output, hidden, second, mlp, last, *angles)
        self._model: StepModel | None = None

    def _panels(self, *weights: Tensor) -> WeightPanels:
        """Returns weights with the same inputs as one."""
        joined = torch.cat([weight.detach() for weight in weights])
        return self._kernels.pack(packed(joined) if self._is_packed else joined.to(self._dtype))

    def _norm(self, module: nn.RMSNorm) -> Norm:
        return Norm(module.weight.detach().float().contiguous(), None, self._config.norm_epsilon)

    def _fill(self, layer: Layer) -> list[object]:
        """Sets the weights and the rule of the only layer; returns what they point into."""
        attention, mlp = layer.self_attn, layer.mlp
        weights = {
            "qkv": self._panels(*(part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj))),
            "out": self._panels(attention.o_proj.weight),
            "gate": self._panels(mlp.gate_proj.weight),
            "up": self._panels(mlp.up_proj.weight),
            "down": self._panels(mlp.down_proj.weight),
        }
        for name, weight in weights.items():
            setattr(self._layers[0], name, weight.struct)
        self._layers[0].rule = ScoreRule(self._config.head_size**-0.5).struct
        return [*weights.values()]

    def allocate(self, block_count: int, block_size: int) -> CpuStorage:
        """Returns storage for the pairs of later passes, zeroed."""
        config = self._config
        storage = CpuStorage(1, block_count, config.kv_head_count, block_size, config.head_size, self._dtype)
        cache = LayerCache(storage.keys[0], storage.values[0])
        self._layers[0].cache = cache.struct
        self._model = StepModel(self._struct, (self._kept, self._layers, cache))
        self._block_count, self._block_size = block_count, block_size
        return storage

    def reduce(self, features: Tensor) -> Tensor:
        """[rows, layers * target hidden] -> f [rows, hidden], of the target's type"""
        return self._kernels.product(self._fc, features)

    def run(self, chunks: Sequence[PairChunk], embeddings: Tensor, asked: Sequence[int]) -> PassResult:
        """Runs a pass. embeddings: [pairs, hidden] of the target's type; `asked`: pairs whose logits are wanted."""
        model, rows, arguments = self._call(chunks, embeddings, asked)
        check_done(self._kernels.step(model, rows, arguments))
        assert arguments.features is not None
        return PassResult(arguments.features, arguments.logits, arguments.is_finite)

    def draft(self, chunk: PairChunk, embeddings: Tensor, chain: Chain) -> tuple[DraftedChain, Tensor]:
        """Runs a pass and a chain behind its last pair, which has a path, in one call. embeddings: see `run`. Returns
        also which pairs are finite, those of the chain last."""
        model, rows, arguments = self._call([chunk], embeddings, [len(chunk.token_ids) - 1])
        path, count = [*chunk.paths[-1], *chain.slots], 1 + len(chain.slots)
        own = self._table, self._before, self._columns, path, chain.keys, chain.temperature, count
        drafted = ChainArguments(model, *own)
        check_done(self._kernels.draft(model, rows, arguments, drafted))
        is_finite = torch.cat([arguments.is_finite, torch.tensor(drafted.is_finite[1:], dtype=torch.bool)])
        return DraftedChain([*zip(drafted.token_ids, drafted.shares)], drafted.is_finite), is_finite

    def _call(
        self, chunks: Sequence[PairChunk], embeddings: Tensor, asked: Sequence[int]
    ) -> tuple[StepModel, Rows, StepArguments]:
        """Returns the arguments of the call that computes these pairs."""
        assert self._model is not None, "a pass was run before allocate"
        arrays: RowArrays = plan_pairs(chunks, self._block_size)
        rows = self._kernels.rows(block_count=self._block_count, block_size=self._block_size, **arrays._asdict())
        features = torch.cat([chunk.features for chunk in chunks])
        arguments = StepArguments(
            self._model,
            torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids]),
            torch.tensor(asked, dtype=torch.int64),
            inputs=features if self._before is None else self._kernels.normalize(self._before, features),
            seconds=embeddings,
            feature_layers=(AFTER_LAYER,),
        )
        return self._model, rows, arguments


def check_done(code: int) -> None:
    """Raises MemoryError for a call without memory, ValueError for one with a token or place that does not exist."""
    if code == structs.NO_MEMORY:
        raise MemoryError("no memory for the buffers of a pass")
    if code != structs.DONE:
        raise ValueError(f"a pass of the head ended with code {code}: a token, position or slot lies outside its sizes")
