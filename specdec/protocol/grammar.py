"""The grammar of a request: the texts that its output may be, as the client states them.

`specdec.grammar` compiles it; here only its form is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import InvalidRequest
from specdec.protocol.limits import CHOICE_COUNT_MAX, GRAMMAR_BYTES_MAX, check_count, check_texts

KINDS = ("json_schema", "json_object", "regex", "choice", "lark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One of KINDS, the others empty: a JSON schema as text, any JSON object, a regular expression that the whole
    output matches, one of some texts, or a Lark grammar. `allow_whitespace`: JSON need not be compact.

    Raises InvalidRequest for none or several, and for more than GRAMMAR_BYTES_MAX bytes.
    """

    json_schema: str = ""
    json_object: bool = False
    regex: str = ""
    choice: tuple[str, ...] = ()
    lark: str = ""
    allow_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name)]
        if len(given) != 1:
            raise InvalidRequest("grammar", " and ".join(given) or "empty", f"one of {', '.join(KINDS)}, not empty")
        check_count("grammar.choice", self.choice, CHOICE_COUNT_MAX, "texts")
        check_texts("grammar.choice", self.choice, GRAMMAR_BYTES_MAX)
        if self.size > GRAMMAR_BYTES_MAX:
            raise InvalidRequest(f"grammar.{self.kind}", f"{self.size} bytes", f"at most {GRAMMAR_BYTES_MAX} bytes")
        if self.allow_whitespace and self.kind not in ("json_schema", "json_object"):
            raise InvalidRequest("grammar.allow_whitespace", True, "absent: it is for JSON")

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next(name for name in KINDS if getattr(self, name))

    @property
    def size(self) -> int:
        """The bytes of its texts in UTF-8."""
        texts = (self.json_schema, self.regex, self.lark, *self.choice)
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
