"""Reads a JSON object character by character: which places it has passed, and the first character that is no JSON."""

from __future__ import annotations

SPACES = " \t\n\r"
LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
ESCAPED = '"\\/bfnrt'
# What of a number may follow each of its parts: the part that a character begins or goes on with.
_DIGITS, _ONE_TO_NINE = "0123456789", "123456789"
NUMBERS = {
    "minus": {"0": "zero"} | dict.fromkeys(_ONE_TO_NINE, "whole"),
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "whole": {".": "point", "e": "exponent", "E": "exponent"} | dict.fromkeys(_DIGITS, "whole"),
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "exponent", "E": "exponent"} | dict.fromkeys(_DIGITS, "fraction"),
    "exponent": {"+": "sign", "-": "sign"} | dict.fromkeys(_DIGITS, "power"),
    "sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
ENDS = ("zero", "whole", "fraction", "power")  # parts that a number may end with


class NotJson(ValueError):
    """The character cannot stand there."""


class JsonObject:
    """Where in a JSON object the reading is. `depth`: open objects and lists, 0 after the end; `place`: what is read or
    must come, of "open", "first key", "key", "colon", "first value", "value", "string", "number", "literal", "comma",
    "end". A string of the outermost object is a key if `is_key`.

    Reads RFC 8259, in which no character of a text is doubtful: whatever was taken is the beginning of a valid object.
    """

    def __init__(self) -> None:
        self.place = "open"
        self.is_key = False
        self._open: list[str] = []
        self._rest = ""  # of a literal; part of a number; in a string "\\" or the hexadecimal digits that must come

    @property
    def depth(self) -> int:
        """Open objects and lists."""
        return len(self._open)

    def take(self, character: str) -> None:
        """Goes on by a character. Raises NotJson, and stays as it is, for one that cannot stand here."""
        if self.place == "string":
            self._take_of_string(character)
        elif self.place == "literal":
            self._take_of_literal(character)
        elif self.place == "number" and character in NUMBERS[self._rest]:
            self._rest = NUMBERS[self._rest][character]
        elif self.place == "number" and self._rest not in ENDS:
            raise NotJson(character)
        elif character in SPACES:
            if self.place == "number":
                self.place = "comma"
        elif self.place in ("number", "comma"):
            self._take_after_value(character)
        else:
            self._take_beginning(character)

    def _take_beginning(self, character: str) -> None:
        if self.place in ("first value", "value"):
            if self.place == "first value" and character == "]":
                self._close()
            else:
                self._begin_value(character)
        elif self.place == "open" and character == "{":
            self._open.append("}")
            self.place = "first key"
        elif self.place in ("first key", "key") and character == '"':
            self._begin_string(is_key=True)
        elif self.place == "first key" and character == "}":
            self._close()
        elif self.place == "colon" and character == ":":
            self.place = "value"
        else:
            raise NotJson(character)

    def _begin_value(self, character: str) -> None:
        if character == "{":
            self._open.append("}")
            self.place = "first key"
        elif character == "[":
            self._open.append("]")
            self.place = "first value"
        elif character == '"':
            self._begin_string(is_key=False)
        elif character in LITERALS:
            self.place, self._rest = "literal", LITERALS[character]
        elif character == "-" or character in _DIGITS:
            self.place = "number"
            self._rest = "minus" if character == "-" else NUMBERS["minus"][character]
        else:
            raise NotJson(character)

    def _begin_string(self, is_key: bool) -> None:
        self.place, self.is_key, self._rest = "string", is_key, ""

    def _take_after_value(self, character: str) -> None:
        if character == self._open[-1]:
            self._close()
        elif character == ",":
            self.place = "key" if self._open[-1] == "}" else "value"
        else:
            raise NotJson(character)

    def _close(self) -> None:
        self._open.pop()
        self.place = "comma" if self._open else "end"

    def _take_of_string(self, character: str) -> None:
        if self._rest == "\\":
            if character != "u" and character not in ESCAPED:
                raise NotJson(character)
            self._rest = "0000" if character == "u" else ""
        elif self._rest:
            if character not in "0123456789abcdefABCDEF":
                raise NotJson(character)
            self._rest = self._rest[1:]
        elif character == '"':
            self.place = "colon" if self.is_key else "comma"
        elif character == "\\":
            self._rest = "\\"
        elif character < " ":
            raise NotJson(character)

    def _take_of_literal(self, character: str) -> None:
        if character != self._rest[0]:
            raise NotJson(character)
        self._rest = self._rest[1:]
        if not self._rest:
            self.place = "comma"
