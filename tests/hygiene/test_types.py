"""Errors that mypy may ignore: one error, by its code, for a reason written beside it."""

from __future__ import annotations

import io
import re
import tokenize

from tests.hygiene.sources import PRODUCT_FOLDERS, modules_below, report

IGNORE = re.compile(r"#\s*type:\s*ignore")
PATTERN = re.compile(r"# type: ignore\[[a-z-]+(, ?[a-z-]+)*\]  # \S.*")


def test_every_ignored_type_error_is_named_and_has_a_reason() -> None:
    """Claim: `type: ignore` always names its code, and a reason follows in the same comment.

    Conclusive: the comments of every Python file with such words are found as Python finds them, in strings there are
    none.
    """
    problems = []
    for module in modules_below(*PRODUCT_FOLDERS, "tests"):
        if not IGNORE.search(module.text):
            continue
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            is_ignore = token.type == tokenize.COMMENT and IGNORE.match(token.string)
            if is_ignore and not PATTERN.fullmatch(token.string):
                problems.append(f"{module.path}:{token.start[0]}: {token.string}")
    assert not problems, report(problems, "name the code and say why: # type: ignore[code]  # reason")
