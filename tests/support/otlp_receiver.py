"""A collector for tests and benchmarks: receives spans over OTLP and returns them, in memory or over HTTP.

It receives from the real exporter over a real socket. `serve_http` answers `/api/v3/traces/{id}` and searches in the
form of Jaeger, so that the trace reader can be tested on a real connection; no other part of Jaeger exists here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.trace.v1 import trace_pb2 as trace_pb

from tests.support.processes import module_command

POLL_S = 0.02
IDS = ("traceId", "spanId", "parentSpanId")


class Receiver(service_grpc.TraceServiceServicer):
    """An OTLP collector on a free loopback port; spans stay in memory if they are to be kept."""

    def __init__(self, keeps_spans: bool = True) -> None:
        self._keeps_spans = keeps_spans
        self.resource_spans: list[trace_pb.ResourceSpans] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        service_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(  # noqa: N802
        self, request: service_pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> service_pb.ExportTraceServiceResponse:
        """Takes one batch."""
        if self._keeps_spans:
            self.resource_spans.extend(request.resource_spans)
        return service_pb.ExportTraceServiceResponse()

    def __enter__(self) -> Receiver:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def spans(self, trace_id: bytes | None = None) -> Iterator[tuple[str, trace_pb.Span]]:
        """(service name, span) of all that came, or of one trace."""
        for resource_spans in list(self.resource_spans):
            names = {entry.key: entry.value.string_value for entry in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    if trace_id is None or span.trace_id == trace_id:
                        yield names["service.name"], span

    def wait_until(self, is_there: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Returns once the condition holds. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while not is_there():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not there after {timeout_s:g} s; {sum(1 for _ in self.spans())} spans came")
            time.sleep(POLL_S)

    def as_json(self, trace_id: bytes) -> dict[str, Any]:
        """One trace as OTLP's JSON, with hexadecimal ids."""
        kept = []
        for resource_spans in list(self.resource_spans):
            one = trace_pb.ResourceSpans()
            one.CopyFrom(resource_spans)
            for scope_spans in one.scope_spans:
                others = [span for span in scope_spans.spans if span.trace_id != trace_id]
                for span in others:
                    scope_spans.spans.remove(span)
            if any(scope_spans.spans for scope_spans in one.scope_spans):
                kept.append(json_format.MessageToDict(one))
        return {"resourceSpans": with_hexadecimal_ids(kept)}

    @contextmanager
    def serve_http(self) -> Iterator[str]:
        """Serves `/api/v3/traces` on a free loopback port; yields the address, such as http://127.0.0.1:1234."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, answer = receiver.answer(self.path)
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    def search(self, path: str) -> list[bytes]:
        """The ids of the newest traces with a span of the service that has all attributes, in the window of time."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
        wanted = json.loads(asked["query.attributes"])
        since, until = (datetime.fromisoformat(asked[f"query.start_time_{end}"]).timestamp() for end in ("min", "max"))
        begun: dict[bytes, int] = {}
        for service, span in self.spans():
            said = {entry.key: entry.value.string_value for entry in span.attributes}
            said |= {"error": "true"} if span.status.code == trace_pb.Status.STATUS_CODE_ERROR else {}
            is_timely = since <= span.start_time_unix_nano / 1e9 <= until
            if service == asked["query.service_name"] and wanted.items() <= said.items() and is_timely:
                begun[span.trace_id] = max(span.start_time_unix_nano, begun.get(span.trace_id, 0))
        newest = sorted(begun, key=lambda trace_id: begun[trace_id], reverse=True)
        return newest[: int(asked["query.search_depth"])]

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """Code and answer of one request, as Jaeger's gateway shapes them."""
        if "?" in path:
            trace_ids = self.search(path)
        else:
            named = path.removeprefix("/api/v3/traces/")
            try:
                trace_ids = [bytes.fromhex(named)]
            except ValueError:
                return 400, {"error": {"httpCode": 400, "message": f"malformed parameter trace_id: {named}"}}
        found = [entry for trace_id in trace_ids for entry in self.as_json(trace_id)["resourceSpans"]]
        if not found:
            return 404, {"error": {"httpCode": 404, "message": "No traces found"}}
        return 200, {"result": {"resourceSpans": found}}


def with_hexadecimal_ids(value: Any) -> Any:
    """OTLP's JSON has ids in hexadecimal where protobuf's own has base64."""
    if isinstance(value, list):
        return [with_hexadecimal_ids(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    parsed = {name: with_hexadecimal_ids(entry) for name, entry in value.items()}
    for name in IDS:
        if name in parsed:
            parsed[name] = json_format.ParseDict({"traceId": value[name]}, trace_pb.Span()).trace_id.hex()
    return parsed


@contextmanager
def collector() -> Iterator[str]:
    """A collector in a process of its own, which drops all spans; yields its endpoint."""
    command = module_command("tests.support.otlp_receiver")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main() -> int:
    """Runs a collector in a process of its own that drops all spans: prints its endpoint, ends with its standard
    input."""
    with Receiver(keeps_spans=False) as receiver:
        print(receiver.endpoint, flush=True)
        while sys.stdin.read(1):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
