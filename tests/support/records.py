"""Records of rounds for tests, by the names of their values."""

from __future__ import annotations

from typing import Any

from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.records import RoundRecord, RoundTimes, RoundTokens, TargetStep, TreeUse

PARTS = {"tokens": RoundTokens, "tree": TreeUse, "times": RoundTimes, "step": TargetStep}


def round_record(round_index: int = 1, plan: Plan = OFF_PLAN, **values: Any) -> RoundRecord:
    """A record with these values, those of its parts by their own names; all others have their defaults."""
    return changed(RoundRecord(round_index, plan, *(part() for part in PARTS.values())), **values)


def changed(record: RoundRecord, **values: Any) -> RoundRecord:
    """The record with these values in place of its own. Raises TypeError for a name that no part has."""
    for name, part in PARTS.items():
        own = {field: values.pop(field) for field in part._fields if field in values}
        record = record._replace(**{name: getattr(record, name)._replace(**own)})
    return record._replace(**values)
