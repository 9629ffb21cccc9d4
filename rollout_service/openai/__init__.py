"""OpenAI's HTTP endpoints over `Sessions`: agents run unchanged and are recorded as trees.

Calls the sessions in process: a second hop would encode every token twice and could not ask for
what the wire does not have, a branch that no model is told of.
"""

from rollout_service.openai.server import RunningOpenAI, serve_openai

__all__ = ["RunningOpenAI", "serve_openai"]
