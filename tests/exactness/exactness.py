"""The exactness check: output distributions over several rounds against the target distribution, as fractions."""

from __future__ import annotations

from fractions import Fraction

from tests.exactness.enumeration import Child, Path, Setting, probability


def output_distribution(
    setting: Setting, count: int, path: Path | None = None, chain: tuple[Child, ...] = ()
) -> dict[Path, Fraction]:
    """The joint distribution of the next `count` tokens after a path, or the prompt, over as many rounds as they
    need."""
    path = setting.prompt if path is None else path
    if count <= 0:
        return {(): Fraction(1)}
    key = ("output", count, path, chain)
    if key not in setting.cache:
        params: dict[Path, Fraction] = {}
        for (committed, left), share in setting.rounds(path, chain).items():
            for rest, part in output_distribution(setting, count - len(committed), path + committed, left).items():
                tokens = (*committed, *rest)[:count]
                params[tokens] = params.get(tokens, Fraction(0)) + share * part
        setting.cache[key] = params
    return setting.cache[key]


def target_output_distribution(setting: Setting, count: int, path: Path | None = None) -> dict[Path, Fraction]:
    """The joint distribution of the next `count` tokens of the target alone, after a path or the prompt."""
    path = setting.prompt if path is None else path
    if count == 0:
        return {(): Fraction(1)}
    return {
        (token, *rest): share * part
        for token, share in enumerate(setting.target_distribution(path))
        if share
        for rest, part in target_output_distribution(setting, count - 1, (*path, token)).items()
    }


def committed_count_distribution(setting: Setting) -> dict[int, Fraction]:
    """The distribution of the number of tokens that the first round commits."""
    params: dict[int, Fraction] = {}
    for (committed, _), share in setting.rounds(setting.prompt, ()).items():
        params[len(committed)] = params.get(len(committed), Fraction(0)) + share
    return params


def expected_committed_count_distribution(setting: Setting) -> dict[int, Fraction]:
    """The same by the theorem: a token passes with the sum over tokens of min(target, draft); one more follows."""
    length_max = setting.draft_length(setting.prompt)
    reached = [Fraction(1)]
    paths = {setting.prompt: Fraction(1)}
    for _ in range(length_max):
        longer: dict[Path, Fraction] = {}
        for path, mass in paths.items():
            target = setting.target_distribution(path)
            for _, child in setting.children(path):
                shared = min(target[child.token_id], probability(child.draft_probs, child.token_id))
                longer[(*path, child.token_id)] = mass * shared
        paths = longer
        reached.append(sum(paths.values(), Fraction(0)))
    reached.append(Fraction(0))
    params = {count + 1: reached[count] - reached[count + 1] for count in range(length_max + 1)}
    return {count: share for count, share in params.items() if share}


def check_exactness(setting: Setting, count: int = 3) -> None:
    """Raises AssertionError unless the output has the target distribution and rounds the theorem's lengths."""
    found = {path: share for path, share in output_distribution(setting, count).items() if share}
    assert found == target_output_distribution(setting, count), "the output does not have the target distribution"
    assert committed_count_distribution(setting) == expected_committed_count_distribution(setting), (
        "rounds commit too few or too many"
    )
