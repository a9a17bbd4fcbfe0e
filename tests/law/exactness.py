"""The exactness check: output laws over several rounds beside the target's own, as fractions."""

from __future__ import annotations

from fractions import Fraction

from tests.law.enumeration import PROMPT, Child, Path, Setting, probability


def output_law(
    setting: Setting, count: int, path: Path = PROMPT, chain: tuple[Child, ...] = ()
) -> dict[Path, Fraction]:
    """The joint law of the next `count` output tokens, over as many rounds as it takes."""
    if count <= 0:
        return {(): Fraction(1)}
    key = ("output", count, path, chain)
    if key not in setting.cache:
        law: dict[Path, Fraction] = {}
        for (committed, left), share in setting.rounds(path, chain).items():
            for rest, part in output_law(setting, count - len(committed), path + committed, left).items():
                tokens = (*committed, *rest)[:count]
                law[tokens] = law.get(tokens, Fraction(0)) + share * part
        setting.cache[key] = law
    return setting.cache[key]


def target_output_law(setting: Setting, count: int, path: Path = PROMPT) -> dict[Path, Fraction]:
    """The joint law of the next `count` tokens of the target alone."""
    if count == 0:
        return {(): Fraction(1)}
    return {
        (token, *rest): share * part
        for token, share in enumerate(setting.target_law(path))
        if share
        for rest, part in target_output_law(setting, count - 1, (*path, token)).items()
    }


def committed_count_law(setting: Setting) -> dict[int, Fraction]:
    """How many tokens the first round commits."""
    law: dict[int, Fraction] = {}
    for (committed, _), share in setting.rounds(PROMPT, ()).items():
        law[len(committed)] = law.get(len(committed), Fraction(0)) + share
    return law


def expected_committed_count_law(setting: Setting) -> dict[int, Fraction]:
    """What the theorem says: a token passes with sum over tokens of min(target, draft); one more always follows."""
    length_max = setting.draft_length(PROMPT)
    reached = [Fraction(1)]
    paths = {PROMPT: Fraction(1)}
    for _ in range(length_max):
        longer: dict[Path, Fraction] = {}
        for path, mass in paths.items():
            target = setting.target_law(path)
            for _, child in setting.children(path):
                shared = min(target[child.token_id], probability(child.row, child.token_id))
                longer[(*path, child.token_id)] = mass * shared
        paths = longer
        reached.append(sum(paths.values(), Fraction(0)))
    reached.append(Fraction(0))
    law = {count + 1: reached[count] - reached[count + 1] for count in range(length_max + 1)}
    return {count: share for count, share in law.items() if share}


def check_exactness(setting: Setting, count: int = 3) -> None:
    """Raises AssertionError unless the output law is the target's and rounds are as long as the theorem says."""
    found = {path: share for path, share in output_law(setting, count).items() if share}
    assert found == target_output_law(setting, count), "the output law is not the target's"
    assert committed_count_law(setting) == expected_committed_count_law(setting), "rounds commit too few or too many"
