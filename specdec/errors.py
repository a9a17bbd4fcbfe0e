"""The errors of specdec and the party that causes each.

    SpecdecError
    ├── ConfigError            the operator's: one line with the remedy; ends a command
    │   └── ModelRefused       the model folder's: the file or architecture, and the reason
    ├── InvalidRequest         the sender's: names field, value and limit; nothing was allocated
    ├── GrammarFailed          the request's: its grammar cannot be followed any further
    ├── CacheExhausted         the load's: too few free blocks now; retry later
    ├── SessionUnknown         the name of what is asked for is not known
    ├── Mismatch               two services do not fit together (tokenizer, protocol version)
    ├── ReplicaUnavailable     a replica is lost; generated tokens are not
    ├── DeliveryStalled        the client's: it read nothing, or a link sent nothing, for too long
    └── NumericsError          the model's: not-a-number in one request's logits

`specdec.rpc.status` maps them to gRPC codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

ONE_LINE_LENGTH_MAX = 400  # of what another library says about a folder

RANK_LOST_EXIT_CODE = 3
ENGINE_LOST_EXIT_CODE = 4


class SpecdecError(Exception):
    """Base of all errors of specdec. `reason` is one word for programs, `str(error)` a sentence for people, `exit_code`
    that of a command that it ends."""

    reason = "INTERNAL"
    exit_code = 1


class ConfigError(SpecdecError):
    """A setting, file or port that cannot be used."""

    reason = "CONFIG"


class ModelRefused(ConfigError):
    """A model folder that specdec does not serve: missing file, unsupported architecture, unsafe format."""

    reason = "MODEL_REFUSED"


def one_line(error: BaseException) -> str:
    """Returns what an error of another library says, in one line of at most ONE_LINE_LENGTH_MAX characters; its kind if
    it says nothing."""
    sentence = " ".join(str(error).split()) or type(error).__name__
    return sentence if len(sentence) <= ONE_LINE_LENGTH_MAX else f"{sentence[: ONE_LINE_LENGTH_MAX - 3]}..."


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever a library raises about a model folder within becomes ModelRefused: `what`, and its words in one line."""
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:  # a library raises what it likes
        raise ModelRefused(f"{what}: {one_line(error)}") from error


class InvalidRequest(SpecdecError):
    """A field outside its limits. Raised before anything is allocated."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, value: object, limit: str):
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} is {shown}; it must be {limit}")
        self.field = field
        self.value = shown
        self.limit = limit


class GrammarFailed(SpecdecError):
    """The grammar of one request cannot be followed any further: a limit of the matcher, a defect of it, or a model
    that has no token for what must come next. Its neighbours are not affected."""

    reason = "GRAMMAR"


class CacheExhausted(SpecdecError):
    """Too few free cache blocks or session slots; `retry_after_s`: the time until a retry may succeed."""

    reason = "CACHE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SessionUnknown(SpecdecError):
    """A name, of a trace or a session, that is not known."""

    reason = "SESSION_UNKNOWN"


class Mismatch(SpecdecError):
    """Two incompatible services; the message names both."""

    reason = "MISMATCH"


class ReplicaUnavailable(SpecdecError):
    """A replica was lost or never reachable."""

    reason = "REPLICA_UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PeerRefused(SpecdecError):
    """A peer whose certificate has none of the allowed names."""

    reason = "PEER_REFUSED"


class DeliveryStalled(SpecdecError):
    """The client read nothing, or a coordinator's link sent nothing, for longer than allowed."""

    reason = "DELIVERY_STALLED"


class NumericsError(SpecdecError):
    """Not-a-number or infinite logits for one request; its neighbours are not affected."""

    reason = "NUMERICS"
