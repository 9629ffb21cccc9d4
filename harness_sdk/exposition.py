"""A service's figures at `/metrics`, as Prometheus reads them; needs prometheus_client."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from harness_sdk.errors import ConfigError

_OTHER = re.compile(r"[^a-zA-Z0-9]+")


def metric_name(service: str, name: str) -> str:
    """`octopus_trainer_reward_mean` for `reward/mean` of the trainer."""
    return f"octopus_{service}_{_OTHER.sub('_', name)}"


@contextlib.contextmanager
def exposed(
    service: str,
    read: Callable[[], Mapping[str, float]],
    *,
    host: str,
    port: int,
    labels: Mapping[str, str],
    counters: Mapping[str, str] | None = None,
) -> Generator[str]:
    """Serve what `read` returns until the block ends.

    Args:
        service: First word of every name after `octopus`.
        read: `area/name` to value; called on a thread of the server's.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        labels: Beside each value, as the run.
        counters: Prefix of names -> label. Names that begin so are one counter, the rest of each
            its label's value; every other figure is a gauge.

    Yields:
        `host:port` that is bound.

    Raises:
        ConfigError: prometheus_client is not installed, or the address cannot be bound.
    """
    try:
        prometheus: Any = importlib.import_module("prometheus_client")
        core: Any = importlib.import_module("prometheus_client.core")
    except ImportError as error:
        raise ConfigError(
            "Prometheus needs prometheus_client",
            value=f"port {port}",
            remedy="pip install 'octopus-agents[metrics]'",
        ) from error

    class Figures:
        def collect(self) -> Generator[Any]:
            figures = dict(sorted(read().items()))
            for prefix, label in (counters or {}).items():
                counted = {
                    name: figures.pop(name) for name in [*figures] if name.startswith(prefix)
                }
                name = prefix.rstrip("_/")
                family = core.CounterMetricFamily(
                    metric_name(service, name),
                    f"{name} of the {service}, by {label}",
                    labels=[*labels, label],
                )
                for name, value in counted.items():
                    family.add_metric([*labels.values(), name.removeprefix(prefix)], value)
                yield family
            for name, value in figures.items():
                family = core.GaugeMetricFamily(
                    metric_name(service, name), f"{name} of the {service}", labels=list(labels)
                )
                family.add_metric(list(labels.values()), value)
                yield family

    # Nothing is described beforehand: `read` may have nothing to tell yet.
    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(Figures())
    try:
        server, thread = prometheus.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            "the address for Prometheus cannot be bound",
            value=f"{host}:{port}",
            remedy=f"{error.strerror}; take another port",
        ) from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
