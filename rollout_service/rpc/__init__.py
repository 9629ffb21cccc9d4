"""The gRPC server: messages to calls on `Sessions` and back. No rule of an episode lives here."""

from rollout_service.rpc.server import RunningServer, serve

__all__ = ["RunningServer", "serve"]
