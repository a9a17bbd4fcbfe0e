"""What blocks of requests say about a server: the metrics of `vllm bench serve` by their names, and ratios of the two
ways in turns.

Pure functions of times that were taken. Time to the first token is from sending a request to its first tokens; time per
output token is the rest of its time by its other tokens; inter-token latency is between messages with tokens, of which
one may bring all tokens of a round; end-to-end latency is from sending to the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from specdec.client.load import OFF, ON, Answer, Block
from specdec.client.ratios import Ratio, ratio_of
from specdec.protocol.types import Rule

LATENCIES = ("ttft", "tpot", "itl", "e2el")
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
IN_TURNS = (*THROUGHPUTS, *(f"{kind}_{name}_ms" for name in LATENCIES for kind in ("mean", "median")))


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which `share` of them lie, between two of them by the distance to each."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def latencies_s(answer: Answer) -> dict[str, list[float]]:
    """Returns the times of an answer, by LATENCIES, in seconds; those that it does not have are empty."""
    moments = [moment_s for moment_s, _ in answer.deltas]
    count = sum(tokens for _, tokens in answer.deltas)
    return {
        "ttft": [moments[0] - answer.sent_s] if moments else [],
        "tpot": [(answer.ended_s - moments[0]) / (count - 1)] if count > 1 else [],
        "itl": [after - before for before, after in zip(moments, moments[1:])],
        "e2el": [answer.ended_s - answer.sent_s],
    }


def metrics_of(blocks: Sequence[Block]) -> dict[str, float]:
    """Returns metrics of blocks of one way, one after another. Failed answers are counted, and in no other metric; a
    metric without values is absent. Times are in milliseconds, throughput is a second, acceptance of 1."""
    answers = [answer for block in blocks for answer in block.answers]
    ended = [answer for answer in answers if answer.finished is not None and answer.failure is None]
    duration_s = sum(block.duration_s for block in blocks)
    inputs = sum(answer.finished.prompt_tokens for answer in ended if answer.finished)
    outputs = sum(count for answer in ended for _, count in answer.deltas)
    found: dict[str, float] = {
        "completed": len(ended),
        "failed": len(answers) - len(ended),
        "duration": duration_s,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
    }
    if duration_s > 0:
        found |= dict(
            zip(THROUGHPUTS, (len(ended) / duration_s, outputs / duration_s, (inputs + outputs) / duration_s))
        )
    for name in LATENCIES:
        values_ms = [1000 * value for answer in ended for value in latencies_s(answer)[name]]
        if values_ms:
            found[f"mean_{name}_ms"] = statistics.fmean(values_ms)
            found[f"median_{name}_ms"] = percentile(values_ms, 0.5)
            found[f"p99_{name}_ms"] = percentile(values_ms, 0.99)
    return found | _speculation(ended, outputs)


def _speculation(ended: Sequence[Answer], outputs: int) -> dict[str, float]:
    """Metrics of draft tokens; empty where none was verified."""
    counts = [answer.statistics for answer in ended]
    rounds, drafted = sum(own.num_spec_steps for own in counts), sum(own.num_draft_tokens for own in counts)
    if not rounds or not drafted:
        return {}
    accepted = sum(own.num_accepted_draft_tokens for own in counts)
    return {
        "spec_decode_acceptance_rate": accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / rounds,
        "spec_decode_num_drafts": rounds,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "draft_link_bytes_per_token": sum(own.draft_link_bytes for own in counts) / max(1, outputs),
    }


def ratios_in_turns(blocks: Sequence[Block]) -> dict[str, Ratio]:
    """Returns on / off of each of IN_TURNS over pairs of blocks of one turn; a pair counts if both are complete and no
    request of them failed. Absent without pairs."""
    whole = {
        (block.way, block.turn): metrics_of([block])
        for block in blocks
        if block.is_complete and all(answer.failure is None for answer in block.answers)
    }
    pairs = [(whole[ON, turn], whole[OFF, turn]) for way, turn in whole if way == ON and (OFF, turn) in whole]
    found = {
        name: [on[name] / off[name] for on, off in pairs if on.get(name, 0) > 0 and off.get(name, 0) > 0]
        for name in IN_TURNS
    }
    return {name: ratio_of(values) for name, values in found.items() if values}


def same_texts(blocks: Sequence[Block]) -> tuple[int, int]:
    """Returns how many prompts of both ways had the same tokens, of how many; those whose rule promises only the same
    distribution are left out."""
    texts: dict[str, dict[int, list[int]]] = {ON: {}, OFF: {}}
    for block in blocks:
        for answer in block.answers:
            is_promised = answer.started is not None and answer.started.rule is not Rule.REJECTION
            if answer.finished is not None and is_promised:
                texts[block.way][answer.number] = answer.token_ids
    both = texts[ON].keys() & texts[OFF].keys()
    return sum(texts[ON][number] == texts[OFF][number] for number in both), len(both)
