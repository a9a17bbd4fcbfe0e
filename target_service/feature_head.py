"""A feature head on the target (EAGLE-3, Li et al. 2025, arXiv 2503.01840): after the sampler it drafts the tree that
each verification's `HeadPlan` asks for, below the token that the round commits last.

The pairs of committed positions that are not in the cells are computed first, with those behind the base in scratch
slots: the features of accepted tokens lie in the cells of their draft tokens, which are not moved yet. Then pass after
pass reads its own x, all sessions of the step together, and grows the trees as the draft service does. It decides no
text; nothing is computed for a step without such a verification.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy
import torch
from torch import Tensor

from specdec.decoding.logits_processors import may_edit
from specdec.decoding.prompt_logprobs import TargetOutput, TargetWork
from specdec.decoding.proposal import NOISED_TOKENS_MAX, KnownTokens, ProposalRequest, has_cut, propose
from specdec.decoding.token_path import TokenPath
from specdec.decoding.verification import VerificationRequest
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.eagle.pairs import FIRST, Chain, PairChunk, slots_of
from specdec.engine.eagle.storage import SCRATCH_CELLS
from specdec.engine.interface import Chunk
from specdec.protocol.calibration import Calibration
from specdec.protocol.growth import GrowingNode, GrowingTree
from specdec.protocol.limits import NODES_PER_ITEM_MAX
from specdec.protocol.noise import Lane, stream_key, uniform_bits
from specdec.protocol.rejection import conclude
from specdec.protocol.types import DraftNode, ResolvedSamplingParams, Rule, SamplerOutput

PAIRS_MAX = 512  # of a pass: bounds its buffers where a whole prompt lacks its pairs
BRANCH_COUNT = 3  # guesses beside the proposal child, as of a draft service
TREES_KEPT = 1024  # of sessions, until their next round tells which guesses came true
TIMED_ROWS, TIMED_REPEATS, TIMED_CHAIN = (1, 2, 4, 8, 16), 3, 3


@dataclass(slots=True, eq=False)
class Drafting:
    """The drafting of one session in one round.

    `accepted`: the draft tokens that the round commits, by index; `tail`: all tokens that it commits, the last of which
    is the tree's root. `base`: the first position whose
    pair is in a scratch slot; `slots`: of the pairs from there to the root's; `places`: of each evaluated node its
    slots from `base` on, and its x. `nodes`: what is sent.
    """

    request: VerificationRequest
    block_ids: Sequence[int]
    accepted: tuple[int, ...]
    tail: tuple[int, ...]
    base: int
    growth: GrowingTree
    reach: int
    slots: list[int] = field(default_factory=list)
    places: dict[GrowingNode, tuple[list[int], Tensor]] = field(default_factory=dict)
    nodes: list[DraftNode] = field(default_factory=list)
    is_over: bool = False

    @property
    def tokens(self) -> TokenPath:
        """All tokens that are committed after the round."""
        return path_behind(self.request.committed, self.tail)

    def feature_cell(self, position: int) -> int:
        """Returns the cell of the features of a committed position: that of an accepted token is its draft token's."""
        base = self.request.base_position
        return position if position < base else base + self.accepted[position - base]

    def may_send_more(self) -> bool:
        """Whether the nodes of another pass may be sent with their children."""
        plan = self.request.head_plan
        return len(self.nodes) + plan.nodes_per_step * (2 + plan.siblings) <= NODES_PER_ITEM_MAX


def path_behind(committed: Sequence[int], tail: Sequence[int]) -> TokenPath:
    """Returns the path of committed tokens and more tokens behind them."""
    if isinstance(committed, TokenPath):
        return committed.followed_by(tail)
    return TokenPath(committed, len(committed), tail)


class FeatureHeadDrafter:
    """Adds the nodes of a feature head to sampler outputs. Engine thread only."""

    def __init__(self, model: EagleTarget) -> None:
        self._model, self._known = model, KnownTokens(model.target_ids)
        self._calibration = Calibration()
        self._trees: OrderedDict[int, GrowingTree] = OrderedDict()  # by the sessions' secrets, oldest first

    def __call__(
        self,
        requests: Sequence[TargetWork],
        chunks: Sequence[Chunk],
        hidden: Sequence[Tensor | None],
        outputs: Sequence[TargetOutput],
    ) -> Sequence[TargetOutput]:
        """Returns the outputs, those of requests with a plan for the head with nodes. `chunks`: the rows of each."""
        drafted: dict[int, Drafting] = {}
        for index, (request, chunk, output) in enumerate(zip(requests, chunks, outputs)):
            if isinstance(request, VerificationRequest) and isinstance(output, SamplerOutput):
                own = self._begin(request, chunk, output) if request.head_plan.window else None
                if own is not None:
                    drafted[index] = own
        if not drafted:
            return outputs
        self._draft(list(drafted.values()))
        found = list(outputs)
        for index, own in drafted.items():
            output = outputs[index]
            assert isinstance(output, SamplerOutput)
            found[index] = output._replace(head_nodes=tuple(own.nodes))
        return found

    def measure_passes(self, vocabulary_size: int) -> tuple[tuple[int, float], ...]:
        """Returns (rows, seconds) of passes with their proposals, ascending: the least of some. Engine thread only."""
        found: list[tuple[int, float]] = []
        for row_count in TIMED_ROWS:
            least_s = min(self.time_pass(row_count, vocabulary_size) for _ in range(TIMED_REPEATS))
            found.append((row_count, max(least_s, found[-1][1] if found else 0.0)))
        return tuple(found)

    def time_pass(self, row_count: int, vocabulary_size: int) -> float:
        """Returns the seconds of one pass of pairs without a text before them, with its greedy proposals; of one row
        where it is part of a chain of TIMED_CHAIN, if the model has them."""
        storage, hidden_size = self._model.storage, self._model.config.hidden_size
        params = ResolvedSamplingParams(Rule.GREEDY, 0, 1, temperature=0.0)
        features = storage.features.new_zeros(row_count, hidden_size)
        paths = [[storage.scratch_start + row] for row in range(row_count)]
        chunk = PairChunk((0,), numpy.zeros(0, numpy.int64), FIRST, [0] * row_count, features, paths)
        started_s = time.perf_counter()
        if row_count == 1 and self._model.has_chains:
            first = storage.scratch_start + 1
            self._model.draft_chain(chunk, Chain(range(first, first + TIMED_CHAIN - 1), None, 1.0))
            return (time.perf_counter() - started_s) / TIMED_CHAIN
        result = self._model.run_pass([chunk], range(row_count))
        propose([ProposalRequest(params, [0], vocabulary_size)] * row_count, result.logits, known=self._known)
        return time.perf_counter() - started_s

    def _begin(self, request: VerificationRequest, chunk: Chunk, output: SamplerOutput) -> Drafting | None:
        """Returns a session's drafting, at its root; None where no token may follow."""
        verdict = conclude(request.params, request, output)
        tail = (*(request.draft_token_ids[index] for index in verdict.accepted), verdict.next_token_id)
        in_place = next((place for place, own in enumerate(verdict.accepted) if own != place), len(tail) - 1)
        length = request.base_position + len(tail)
        reach = min(length + request.head_plan.window, self._model.description.positions_max)
        base, tree = request.base_position + in_place, self._tree(request, length, tail)
        own = Drafting(request, chunk.block_ids, verdict.accepted, tail, base, tree, reach)
        own.growth.restart(own.tokens)
        return own if length < reach else None

    def _tree(self, request: VerificationRequest, length: int, tail: Sequence[int]) -> GrowingTree:
        """Returns the session's tree without a root, once its guesses are counted that came true or not."""
        tree = self._trees.pop(request.head_secret, None)
        if tree is None or tree.rule is not request.params.rule:
            tree = GrowingTree(request.params.rule, self._calibration)
        self._trees[request.head_secret] = tree
        if len(self._trees) > TREES_KEPT:
            self._trees.popitem(last=False)
        base = request.base_position
        if tree.root is not None and tree.root_length < length:
            committed = (request.committed[position] for position in range(tree.root_length, base))
            tree.commit([*committed, *tail[max(0, tree.root_length - base) :]])
        tree.drop()
        return tree

    def _draft(self, every: Sequence[Drafting]) -> None:
        """Grows the trees of all sessions, a pass at a time."""
        free = iter(range(self._model.storage.scratch_start, self._model.storage.scratch_start + SCRATCH_CELLS))
        if len(every) == 1 and self._is_one_call(every[0].request):
            self._draft_chain(every[0], free)
            return
        roots = [(own, own.growth.take(1, own.reach, is_chain=True)) for own in every]
        self._run(roots, [self._first_chunk(own, free) for own in every])
        for index in count(1):
            taken = [(own, self._take(own, index)) for own in every]
            chosen = [(own, nodes) for own, nodes in taken if nodes]
            chunks = [self._node_chunk(own, nodes, free) for own, nodes in chosen]
            if not any(chunk.paths for chunk in chunks):
                return
            self._run(chosen, chunks)

    def _is_one_call(self, request: VerificationRequest) -> bool:
        """Whether what is drafted is a chain whose tokens have the largest logit / temperature + noise of the head's
        own tokens, which the kernels can draft alone."""
        plan, params, known = request.head_plan, request.params, self._known
        is_chain = self._model.has_chains and plan.nodes_per_step == 1 and not plan.siblings
        if not is_chain or may_edit(params) or self._model.description.vocabulary_size < known.end:
            return False
        is_raced = params.rule is Rule.COUPLED and not has_cut(params) and len(known.ids) <= NOISED_TOKENS_MAX
        return params.rule is Rule.GREEDY or is_raced

    def _draft_chain(self, own: Drafting, free: Iterator[int]) -> None:
        """Grows a chain as pass after pass does, in one call: what is computed between passes takes longer than one."""
        chunk, length, params = self._first_chunk(own, free), len(own.tokens), own.request.params
        slots = [next(free) for _ in range(length + 1, own.reach)]
        is_greedy = params.rule is Rule.GREEDY
        places = range(length, own.reach)
        keys = None if is_greedy else [stream_key(params.seed, Lane.GUMBEL, place) for place in places]
        found = self._model.draft_chain(chunk, Chain(slots, keys, 1.0 if is_greedy else params.temperature))
        if not all(found.is_finite):
            return
        for guess in found.guesses:
            (node,) = own.growth.take(1, own.reach, is_chain=True)
            own.nodes += own.growth.evaluated(node, [own.growth.reserve_name()], [guess], None)

    def _take(self, own: Drafting, index: int) -> list[GrowingNode]:
        """Takes a session's nodes of its pass `index`, the root's being 0."""
        plan = own.request.head_plan
        if own.is_over or index >= plan.window or not own.may_send_more():
            return []
        # Nodes in hand decide the rows that are left for siblings: they must not depend on the siblings' tokens.
        is_drawn_tree = plan.siblings > 0 and own.request.params.rule is Rule.REJECTION
        is_chain = plan.nodes_per_step == 1 or is_drawn_tree
        return own.growth.take(plan.nodes_per_step, own.reach, is_chain, wait_reach=own.reach)

    def _first_chunk(self, own: Drafting, free: Iterator[int]) -> PairChunk:
        """Returns the pairs that a session lacks up to its root; runs the first of them where they are too many."""
        storage, tokens = self._model.storage, own.tokens
        cells = numpy.arange(FIRST, own.base)
        cells = cells[~storage.has_pair[slots_of(own.block_ids, cells, storage.block_size)]]
        own.slots = [next(free) for _ in range(own.base, len(tokens))]

        def chunk(positions: numpy.ndarray, behind: Sequence[int]) -> PairChunk:
            """The pairs at these positions, then those of the positions `behind` in scratch slots."""
            every = [*positions.tolist(), *behind]
            before = numpy.array([own.feature_cell(position - 1) for position in every], numpy.int64)
            features = storage.read(slots_of(own.block_ids, before, storage.block_size))
            paths = [own.slots[: position + 1 - own.base] for position in behind]
            token_ids = [tokens[position] for position in every]
            return PairChunk(own.block_ids, positions, own.base, token_ids, features, paths)

        while len(cells) > PAIRS_MAX:
            self._model.run_pass([chunk(cells[:PAIRS_MAX], ())], ())
            cells = cells[PAIRS_MAX:]
        return chunk(cells, range(own.base, len(tokens)))

    def _node_chunk(self, own: Drafting, nodes: list[GrowingNode], free: Iterator[int]) -> PairChunk:
        """Returns the pairs of nodes, as many as scratch slots are left for; the others are given back."""
        features, paths, token_ids = [], [], []
        for place, node in enumerate(nodes):
            slot = next(free, None)
            if slot is None:
                for left in nodes[place:]:
                    own.growth.give_back(left)
                del nodes[place:]
                break
            assert node.parent is not None
            path, x = own.places[node.parent]
            features.append(x)
            paths.append([*path, slot])
            token_ids.append(node.token_id)
        joined = torch.stack(features) if features else self._model.storage.features[:0]
        return PairChunk(own.block_ids, numpy.zeros(0, numpy.int64), own.base, token_ids, joined, paths)

    def _run(self, chosen: Sequence[tuple[Drafting, list[GrowingNode]]], chunks: Sequence[PairChunk]) -> None:
        """Runs a pass whose last pairs of each chunk are those of the nodes, and adds what it proposes."""
        ends = numpy.cumsum([len(chunk.token_ids) for chunk in chunks]).tolist()
        asked = [row for end, (_, nodes) in zip(ends, chosen) for row in range(end - len(nodes), end)]
        result = self._model.run_pass(chunks, asked)
        names: list[list[int]] = []
        requests: list[ProposalRequest] = []
        for own, nodes in chosen:
            for node in nodes:
                filed = own.growth.file(node)
                if filed is not None:
                    own.nodes.append(filed)
                names.append([own.growth.reserve_name() for _ in range(1 + own.request.head_plan.siblings)])
                requests.append(self._request(own, node, names[-1]))
        found = iter(zip(asked, names, propose(requests, result.logits, known=self._known)))
        is_finite = result.is_finite.tolist()
        for (own, nodes), chunk in zip(chosen, chunks):
            paths = chunk.paths[len(chunk.paths) - len(nodes) :]
            for (node, path), (row, its_names, proposal) in zip(zip(nodes, paths), found):
                if not is_finite[row]:
                    own.is_over = True
                    own.nodes.clear()
                if own.is_over:
                    continue
                own.places[node] = [*path], result.x[row]
                own.nodes += own.growth.evaluated(node, its_names, proposal.guesses, proposal.draft_probs)

    def _request(self, own: Drafting, node: GrowingNode, names: Sequence[int]) -> ProposalRequest:
        """Returns the request for a node's children."""
        request = own.request
        plan, params = request.head_plan, request.params
        draws: tuple[int, ...] = ()
        if params.rule is Rule.REJECTION:
            key = request.head_secret, Lane.DRAFT, request.round_index
            draws = tuple(uniform_bits(*key, name) for name in names)
        below = [one.token_id for one in own.growth.path(node)]
        branch_count = plan.siblings or (0 if plan.nodes_per_step == 1 else BRANCH_COUNT)
        path = path_behind(request.committed, [*own.tail, *below])
        return ProposalRequest(params, path, self._model.description.vocabulary_size, draws, branch_count)
