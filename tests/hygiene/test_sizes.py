"""Small files and small functions: the size budget, over everything that is not a test and not generated."""

from __future__ import annotations

from tests.hygiene.sources import FunctionNode, product_modules, report

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_P90_MAX = 30
LINE_CHARACTERS_MAX = 120


def line_count(function: FunctionNode) -> int:
    """Lines from `def` to the last statement, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_no_file_is_longer_than_400_lines() -> None:
    """Claim: every file can be read in one sitting."""
    counts = {module.path: len(module.text.splitlines()) for module in product_modules()}
    problems = [f"{path}:1: {count} lines" for path, count in counts.items() if count > FILE_LINES_MAX]
    assert not problems, report(problems, f"Split what is over {FILE_LINES_MAX} lines by what it knows:")


def test_no_function_is_longer_than_60_lines() -> None:
    """Claim: every function fits one screen."""
    problems = [
        f"{module.at(function)}: {function.name} has {line_count(function)} lines"
        for module in product_modules()
        for function in module.functions()
        if line_count(function) > FUNCTION_LINES_MAX
    ]
    assert not problems, report(problems, f"Split what is over {FUNCTION_LINES_MAX} lines into named steps:")


def test_nine_functions_of_ten_have_at_most_30_lines() -> None:
    """Claim: the 90th percentile over the whole project; the message names the longest ones."""
    sized = sorted(
        (line_count(function), f"{module.at(function)}: {function.name}")
        for module in product_modules()
        for function in module.functions()
    )
    p90 = sized[int(len(sized) * 0.9)][0]
    longest = [f"{function} has {count} lines" for count, function in reversed(sized[-20:])]
    assert p90 <= FUNCTION_LINES_P90_MAX, report(longest, f"p90 is {p90} lines; shorten some of the longest:")


def test_no_line_is_longer_than_120_characters() -> None:
    """Claim: two files fit beside each other on a screen."""
    problems = [
        f"{module.path}:{number}: {len(line)} characters"
        for module in product_modules()
        for number, line in enumerate(module.text.splitlines(), 1)
        if len(line) > LINE_CHARACTERS_MAX
    ]
    assert not problems, report(problems, f"Break lines over {LINE_CHARACTERS_MAX} characters:")
