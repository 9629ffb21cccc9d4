"""One trace an episode: SDK, rollout service, stream, trainer; and nothing where nobody traces."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from harness_sdk import OctopusClient, ToolLoop, control, tracing
from harness_sdk.record import record_from_bytes, record_to_bytes
from harness_sdk.redis_client import redis_client
from rollout_service.chat import ChatRenderer
from rollout_service.rpc import serve
from rollout_service.sessions import Sessions
from rollout_service.stream import EpisodeStream
from tests.chat_tokenizers import chat_tokenizer
from tests.service.sdk_service import ScriptedEngine, calls, scripted
from tests.tiny_models import save_tiny_model
from tests.trainer_runs import episodes, stream_config
from tests.valkey import embedded_valkey
from trainer_service.loop import train
from trainer_service.stream import RedisLink

RPC = "octopus.rpc.v1.Rollout"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans that this process ends, from here on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # OpenTelemetry lets a process set its provider once.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def _script(text: str) -> str:
    if "42" in text:
        return calls(("done", {"answer": "42"}))
    return calls(("multiply", {"a": 6, "b": 7}))


async def multiply(a: int, b: int) -> str:
    """Multiply.

    Args:
        a: First factor.
        b: Second factor.
    """
    return str(a * b)


async def test_an_episode_is_one_trace_from_the_client_into_the_record(
    exported: InMemorySpanExporter, tmp_path: Path
) -> None:
    chat = ChatRenderer(chat_tokenizer(), preamble="compact")
    engine = ScriptedEngine(chat, _script)
    await engine.start()
    async with embedded_valkey(tmp_path) as url, EpisodeStream(url, "default") as stream:
        server = await serve(Sessions(engine, chat, stream))
        async with OctopusClient.connect(server.address) as client:
            for name in ("e1", "e2"):
                async with client.episode(episode_id=name) as episode:
                    await ToolLoop([multiply]).run(episode.root, "6 times 7?")
                    await episode.close(reward=1.0)
        await server.stop(1)
        client_of_redis = redis_client(url)
        entries = await client_of_redis.xrange(control.episodes_key("default"))
        await client_of_redis.aclose()
    spans = {span.context.span_id: span for span in exported.get_finished_spans() if span.context}
    roots = [span for span in spans.values() if span.parent is None]
    assert sorted(str(span.attributes["octopus.episode"]) for span in roots if span.attributes) == [
        "e1", "e2",
    ]  # fmt: skip
    assert {span.name for span in roots} == {"octopus.episode"}
    first = [span for span in spans.values() if _trace(span) == _trace(roots[0])]
    counted = Counter((span.name, span.kind.name) for span in first)
    for name in ("Generate", "Done"):
        assert counted[f"{RPC}/{name}", "CLIENT"] == counted[f"{RPC}/{name}", "SERVER"] > 0
    for name in ("tool", "admission", "session", "extend", "turn", "write"):
        assert counted[f"octopus.{name}", "INTERNAL"] > 0, counted
    for span in first:
        if span.kind.name == "SERVER" and not span.name.endswith("OpenEpisode"):
            assert span.parent is not None
            assert spans[span.parent.span_id].name == span.name
    # The record continues the trace where the replica keeps it.
    record = record_from_bytes(entries[0][1][control.RECORD_FIELD.encode()])
    (session,) = [span for span in first if span.name == "octopus.session"]
    assert session.context is not None
    ids = f"00-{session.context.trace_id:032x}-{session.context.span_id:016x}-"
    assert record.traceparent.startswith(ids)


async def test_failed_call_is_told_with_its_error(exported: InMemorySpanExporter) -> None:
    async with (
        scripted(lambda text: "x") as service,
        OctopusClient.connect(service.address) as client,
        client.episode() as episode,
    ):
        with pytest.raises(Exception, match="step"):
            await episode.root.rewind(5)
    failed = [span for span in exported.get_finished_spans() if span.name == f"{RPC}/Rewind"]
    assert [(span.kind.name, span.status.description) for span in failed] == [
        ("SERVER", "StepNotFound"),
        ("CLIENT", "StepNotFound"),
    ]


async def test_episode_joins_the_trace_that_its_caller_is_in(
    exported: InMemorySpanExporter,
) -> None:
    async with (
        scripted(lambda text: "x") as service,
        OctopusClient.connect(service.address) as client,
    ):
        with trace.get_tracer("mine").start_as_current_span("request") as mine:
            async with client.episode() as episode:
                await episode.root.generate("hello")
            assert trace.get_current_span() is mine
    spans = exported.get_finished_spans()
    assert len({_trace(span) for span in spans}) == 1
    (episode_span,) = [span for span in spans if span.name == "octopus.episode"]
    assert episode_span.parent == mine.get_span_context()


async def test_step_is_told_in_the_trace_of_each_episode_it_used(
    exported: InMemorySpanExporter, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3_5")
    traceparents = {}
    async with embedded_valkey(tmp_path / "valkey") as url:
        link = RedisLink(url, patience_s=20.0)
        for index, record in enumerate(episodes()):
            traceparent = f"00-{index + 1:032x}-{index + 1:016x}-01"
            traceparents[record.episode_id] = index + 1
            data = record_to_bytes(replace(record, traceparent=traceparent))
            await link.client.xadd(control.episodes_key("r"), {control.RECORD_FIELD: data})
        await link.close()
        config = stream_config(tmp_path, model, "r", url)
        await train(config.model_copy(update={"max_steps": 1}), asyncio.Event())
    spans = exported.get_finished_spans()
    (step,) = [span for span in spans if span.name == "octopus.step"]
    told = [span for span in spans if span.name == "octopus.train"]
    assert len(told) == len(step.links) == 2
    for span in told:
        assert span.attributes is not None and span.parent is not None
        number = traceparents[str(span.attributes["octopus.episode"])]
        assert (_trace(span), span.parent.span_id) == (number, number)
        assert step.context is not None
        assert span.links[0].context.span_id == step.context.span_id
        assert (span.start_time or 0) < (span.end_time or 0)
    assert {"octopus.checkpoint", "octopus.acknowledge"} <= {span.name for span in spans}


async def test_nothing_is_traced_where_opentelemetry_is_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    monkeypatch.setattr(tracing, "_otel", None)
    async with (
        scripted(lambda text: "x") as service,
        OctopusClient.connect(service.address) as client,
        client.episode() as episode,
    ):
        await episode.root.generate("hello")
    assert service.records.written[0].traceparent == ""


class _Collector(BaseHTTPRequestHandler):
    requests: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP collector over HTTP."""
    requests: list[ExportTraceServiceRequest] = []
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (_Collector,), {"requests": requests}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def _command(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    set_up = "from harness_sdk.cli.traces import set_up_tracing\nset_up_tracing('run')\n"
    return subprocess.run(
        [sys.executable, "-c", set_up + code],
        env={"PYTHONPATH": ":".join(sys.path), **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_command_exports_by_the_variables_of_opentelemetry(
    collector: tuple[str, list[ExportTraceServiceRequest]],
) -> None:
    url, requests = collector
    code = "from harness_sdk.tracing import spanning\nwith spanning('work', task='t'): pass\n"
    shown = _command(
        code, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf"
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    (sent,) = requests[0].resource_spans
    named = {each.key: each.value.string_value for each in sent.resource.attributes}
    assert named["service.name"] == "octopus-run"
    (span,) = sent.scope_spans[0].spans
    assert (span.name, span.attributes[0].key) == ("work", "octopus.task")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "no exporter zipkin"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "carrier pigeon"}, "grpc"),
    ],
)
def test_exporter_that_is_not_there_is_refused(environment: dict[str, str], told: str) -> None:
    shown = _command("", **environment)
    assert shown.returncode == 1
    assert "ConfigError" in shown.stderr and told in shown.stderr


def test_command_without_the_variables_imports_nothing() -> None:
    code = "import sys; assert 'opentelemetry' not in sys.modules"
    shown = _command(code, OTEL_TRACES_EXPORTER="none", OTEL_EXPORTER_OTLP_ENDPOINT="http://x")
    assert shown.returncode == 0, shown.stderr


def _trace(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id
