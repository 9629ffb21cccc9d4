"""Export of a command's spans, by OpenTelemetry's own OTEL_ variables; nothing without them."""

from __future__ import annotations

import importlib
import logging
import os
from importlib import metadata
from typing import Any

from harness_sdk.errors import ConfigError

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def set_up_tracing(command: str) -> None:
    """Export spans where the environment asks for it, until the process ends.

    `OTEL_TRACES_EXPORTER` names exporters (otlp, console, none, or any that is installed); an OTLP
    endpoint alone means otlp. Resource, sampler, batches, headers and certificates are read from
    their own variables by opentelemetry-sdk.

    Args:
        command: Gives the service its name, `octopus-COMMAND`, unless `OTEL_SERVICE_NAME` does.

    Raises:
        ConfigError: Tracing is asked for and its packages are not installed, or no exporter has
            the name.
    """
    names = _exporters()
    if not names:
        return
    try:
        sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
        processors: Any = importlib.import_module("opentelemetry.sdk.trace.export")
        resources: Any = importlib.import_module("opentelemetry.sdk.resources")
        trace: Any = importlib.import_module("opentelemetry.trace")
    except ImportError as error:
        raise _missing(str(error)) from error
    # What the environment says wins over what is given here.
    resource = resources.Resource.create({"service.name": f"octopus-{command}"})
    provider = sdk.TracerProvider(
        resource=resource.merge(resources.OTELResourceDetector().detect())
    )
    for name in names:
        provider.add_span_processor(processors.BatchSpanProcessor(_exporter(name)()))
    trace.set_tracer_provider(provider)
    logger.info("spans go to %s", ", ".join(names))


def _exporters() -> list[str]:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    asked = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if not asked and any(os.environ.get(name) for name in _ENDPOINTS):
        asked = "otlp"
    return [name for name in map(str.strip, asked.split(",")) if name not in ("", "none")]


def _exporter(name: str) -> Any:
    """The class of an exporter, as its package registers it."""
    wanted = name
    if name == "otlp":
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
        )
        wanted = _PROTOCOLS.get(protocol, "")
        if not wanted:
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_PROTOCOL is not one that OpenTelemetry speaks here",
                value=protocol,
                limit=", ".join(_PROTOCOLS),
                remedy="set one of them",
            )
    for found in metadata.entry_points(group="opentelemetry_traces_exporter", name=wanted):
        try:
            return found.load()
        except ImportError as error:
            raise _missing(str(error)) from error
    raise _missing(f"no exporter {wanted}")


def _missing(what: str) -> ConfigError:
    return ConfigError(
        "the OTEL_ variables ask for traces, and a package is missing",
        value=what,
        remedy="pip install 'octopus-agents[tracing]', or unset OTEL_TRACES_EXPORTER and the"
        " OTLP endpoint",
    )
