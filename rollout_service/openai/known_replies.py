"""What the open sessions have said: who continues, when a request names a response or a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_service.openai.ask import Ask
from rollout_service.openai.conversation import Conversation
from rollout_service.openai.errors import ParameterError
from rollout_service.openai.messages import digests


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    """What a response id stands for."""

    conversation: Conversation
    history: bytes
    instructions: str | None


class KnownReplies:
    """The replies of open sessions."""

    def __init__(self) -> None:
        self._responses: dict[str, _Response] = {}
        self._unnamed: dict[bytes, list[Conversation]] = {}
        """By the history that ends with one of its replies."""

    def remember(self, conversation: Conversation, ask: Ask, reply_id: str) -> None:
        """The reply `reply_id` to `ask`, which `conversation` has taken."""
        history = conversation.replies[reply_id]
        before = self._responses.get(ask.previous)
        instructions = before.instructions if before is not None else ask.instructions
        self._responses[reply_id] = _Response(
            conversation=conversation, history=history, instructions=instructions
        )
        if not conversation.named:
            known = self._unnamed.setdefault(history, [])
            if conversation not in known:
                known.append(conversation)

    def continued(self, ask: Ask) -> tuple[Conversation, list[bytes]]:
        """Whose response a request names, and the digests of its history.

        Raises:
            ParameterError: Nobody's, or it was sampled under other instructions.
        """
        response = self._responses.get(ask.previous)
        found = response is not None and response.conversation.owner == ask.names.owner
        if response is None or not found or response.conversation.is_ending:
            raise ParameterError(
                "no such response in an open session",
                param="previous_response_id",
                value=ask.previous,
                remedy="send the whole input; a closed session's responses are gone",
            )
        if ask.instructions not in (None, response.instructions):
            raise ParameterError(
                "the response to continue was sampled under other instructions",
                param="instructions",
                value=ask.instructions,
                limit=response.instructions or "none",
                remedy="leave them out, or send the whole input without previous_response_id",
            )
        return response.conversation, digests(response.history, ask.messages)

    def by_history(self, ask: Ask, histories: Sequence[bytes]) -> Conversation | None:
        """The open conversation that said the latest of the replies in the history."""
        answered = {message.tool_call_id for message in ask.messages if message.role == "tool"}
        for history in reversed(histories):
            known = [each for each in self._unnamed.get(history, ()) if not each.is_ending]
            if known:
                # Two may have said the same: whose calls are answered, then who waits for more.
                return max(
                    known,
                    key=lambda each: (len(answered & each.calls.keys()), each.can_go_on(history)),
                )
        return None

    def forget(self, conversation: Conversation) -> None:
        """Everything that `conversation` has said."""
        for reply_id, history in conversation.replies.items():
            del self._responses[reply_id]
            known = self._unnamed.get(history, [])
            if conversation in known:
                known.remove(conversation)
            if not known:
                self._unnamed.pop(history, None)
        conversation.replies.clear()
