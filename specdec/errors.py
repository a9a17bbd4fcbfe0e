"""What can go wrong, and whose fault it is.

    SpecdecError
    ├── ConfigError            the operator's: one line that says what to do; ends a command
    │   └── ModelRefused       the model folder's: which file or architecture, and why
    ├── InvalidRequest         the sender's: names field, value and limit; nothing was allocated
    ├── CacheExhausted         nobody's: too little room now; waiting may help
    ├── SessionUnknown         the sender's view is old: open the session again
    ├── Mismatch               two services do not fit together (tokenizer, protocol version)
    ├── ReplicaUnavailable     a replica is gone; what was generated is not lost
    ├── DeliveryStalled        the reader's: it took nothing for too long
    └── NumericsError          the model's: not-a-number in one request's logits

Only `specdec.rpc.status` knows which gRPC code each becomes.
"""


class SpecdecError(Exception):
    """Base of all errors of specdec. `reason` is one word for programs, `str(error)` a sentence for people."""

    reason = "INTERNAL"


class ConfigError(SpecdecError):
    """A setting, file or port that cannot be used."""

    reason = "CONFIG"


class ModelRefused(ConfigError):
    """A model folder that specdec does not serve: missing file, unproven architecture, unsafe format."""

    reason = "MODEL_REFUSED"


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


class CacheExhausted(SpecdecError):
    """Too few free cache blocks or session slots; `retry_after_s` is when trying again may help."""

    reason = "CACHE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SessionUnknown(SpecdecError):
    """A name no open session has."""

    reason = "SESSION_UNKNOWN"


class Mismatch(SpecdecError):
    """Two services that do not fit together; names both sides."""

    reason = "MISMATCH"


class ReplicaUnavailable(SpecdecError):
    """A replica was lost or never there."""

    reason = "REPLICA_UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeliveryStalled(SpecdecError):
    """The client read nothing for longer than allowed."""

    reason = "DELIVERY_STALLED"


class NumericsError(SpecdecError):
    """Not-a-number or infinite logits for one request; its neighbours are not affected."""

    reason = "NUMERICS"
