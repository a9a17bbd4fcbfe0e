from specdec.v1 import field_pb2 as _field_pb2
from specdec.v1 import open_item_pb2 as _open_item_pb2
from specdec.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("stamp", "items")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    stamp: _types_pb2.LinkStamp
    items: _containers.RepeatedCompositeFieldContainer[DraftRequestItem]
    def __init__(self, stamp: _Optional[_Union[_types_pb2.LinkStamp, _Mapping]] = ..., items: _Optional[_Iterable[_Union[DraftRequestItem, _Mapping]]] = ...) -> None: ...

class DraftRequestItem(_message.Message):
    __slots__ = ("open", "extend", "commit", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: _open_item_pb2.OpenItem
    extend: _types_pb2.ExtendItem
    commit: CommitItem
    close: _types_pb2.CloseItem
    def __init__(self, open: _Optional[_Union[_open_item_pb2.OpenItem, _Mapping]] = ..., extend: _Optional[_Union[_types_pb2.ExtendItem, _Mapping]] = ..., commit: _Optional[_Union[CommitItem, _Mapping]] = ..., close: _Optional[_Union[_types_pb2.CloseItem, _Mapping]] = ...) -> None: ...

class CommitItem(_message.Message):
    __slots__ = ("session", "incarnation", "committed_length", "suffix_token_ids", "window", "trace", "nodes_per_step", "siblings", "wait_length")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    WAIT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    committed_length: int
    suffix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    window: int
    trace: _types_pb2.TraceContext
    nodes_per_step: int
    siblings: int
    wait_length: int
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., committed_length: _Optional[int] = ..., suffix_token_ids: _Optional[_Iterable[int]] = ..., window: _Optional[int] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., nodes_per_step: _Optional[int] = ..., siblings: _Optional[int] = ..., wait_length: _Optional[int] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("stamp", "items", "load")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    stamp: _types_pb2.LinkStamp
    items: _containers.RepeatedCompositeFieldContainer[DraftResponseItem]
    load: _types_pb2.Load
    def __init__(self, stamp: _Optional[_Union[_types_pb2.LinkStamp, _Mapping]] = ..., items: _Optional[_Iterable[_Union[DraftResponseItem, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ...) -> None: ...

class DraftResponseItem(_message.Message):
    __slots__ = ("nodes", "missing_tokens", "error")
    NODES_FIELD_NUMBER: _ClassVar[int]
    MISSING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    nodes: NodesItem
    missing_tokens: _types_pb2.MissingTokensItem
    error: _types_pb2.ErrorItem
    def __init__(self, nodes: _Optional[_Union[NodesItem, _Mapping]] = ..., missing_tokens: _Optional[_Union[_types_pb2.MissingTokensItem, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.ErrorItem, _Mapping]] = ...) -> None: ...

class NodesItem(_message.Message):
    __slots__ = ("session", "incarnation", "epoch", "root_length", "nodes", "step_us", "step_rows", "detailed", "worked_us", "active_sessions")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROOT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    DETAILED_FIELD_NUMBER: _ClassVar[int]
    WORKED_US_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    epoch: int
    root_length: int
    nodes: _containers.RepeatedCompositeFieldContainer[_types_pb2.TreeNode]
    step_us: int
    step_rows: int
    detailed: bool
    worked_us: int
    active_sessions: int
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., root_length: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[_types_pb2.TreeNode, _Mapping]]] = ..., step_us: _Optional[int] = ..., step_rows: _Optional[int] = ..., detailed: bool = ..., worked_us: _Optional[int] = ..., active_sessions: _Optional[int] = ...) -> None: ...
