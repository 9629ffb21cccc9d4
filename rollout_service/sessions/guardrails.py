"""Every guardrail of design.md section 4: budgets, reserve, turns, termination, roster, limits.

Each either refuses with a typed error or yields a note; all are counted in the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness_sdk.errors import BudgetExhausted, InvalidRequest
from harness_sdk.record import NodeKind
from harness_sdk.types import ROOT_THREAD, Budget, ThreadStatus, ToolCall
from rollout_service.chat import notes
from rollout_service.chat.renderer import ChatRenderer
from rollout_service.cursors import Cursor, Mount
from rollout_service.engine.base import EngineInfo
from rollout_service.sessions.metrics import Metrics
from rollout_service.sessions.mounts import readable_steps
from rollout_service.sessions.options import EpisodeLimits, SessionOptions
from rollout_service.sessions.threads import Note, Thread, harness_note


class Guardrails:
    """The rules of one episode.

    Args:
        limits: The episode's budgets.
        model_driven: The model itself may call `done`: turns without a call are prompted, the
            reserve is kept for `done`, and limits end the thread.
        reads: The model may call `read_thread`.
        options: The service's limits.
        info: The model's limits.
        chat: The template, whose control tokens cost budget.
        metrics: Where each use of a guardrail is counted.
    """

    def __init__(
        self,
        limits: EpisodeLimits,
        *,
        model_driven: bool,
        reads: bool,
        options: SessionOptions,
        info: EngineInfo,
        chat: ChatRenderer,
        metrics: Metrics,
    ) -> None:
        self.limits = limits
        self.model_driven = model_driven
        self._reads = reads
        self._max_positions = info.max_positions
        self._max_visible = options.max_visible_tokens or info.max_positions
        self._chat = chat
        self._metrics = metrics
        # The least that another turn appends: end of the last one, its own opening, one token.
        self._least_turn = len(chat.terminator) + chat.longest_opening + 1

    def budget(self, thread: Thread, num_threads: int) -> Budget:
        """What is left to `thread` in an episode of `num_threads` threads."""
        used = thread.tokens_used
        left = max(self.limits.thread_budget - used, 0)
        return Budget(
            tokens_used=used,
            tokens_left=left,
            turns_left=max(self.limits.max_turns - thread.num_turns, 0),
            threads_left=max(self.limits.max_threads - (num_threads - 1), 0),
            reserve_reached=left <= self.limits.answer_reserve,
        )

    def check_turn(self, thread: Thread) -> None:
        """Refuse a turn past `max_turns`.

        Raises:
            BudgetExhausted: No turn is left.
        """
        if thread.num_turns >= self.limits.max_turns:
            thread.exhausted = ThreadStatus.MAX_TURNS
            raise self._exhausted(
                thread,
                "no model turn is left",
                value=f"{thread.num_turns} turns",
                limit=self.limits.max_turns,
                remedy="call done, or open the episode with a higher max_turns",
            )

    def check_primitive(self, thread: Thread, action: str) -> None:
        """Refuse everything but `done` once the answer reserve is reached.

        Raises:
            BudgetExhausted: The reserve is reached.
        """
        left = self.limits.thread_budget - thread.tokens_used
        if left <= self.limits.answer_reserve:
            raise self._exhausted(
                thread,
                f"the answer reserve is reached: no {action}",
                value=f"{left} tokens left",
                limit=f"more than {self.limits.answer_reserve}",
                remedy="call done",
            )

    def check_cost(self, thread: Thread, cost: int, least: int = 0) -> None:
        """Refuse to append `cost` tokens that leave fewer than `least`, by budget or model.

        Raises:
            BudgetExhausted: They do not fit.
        """
        used = thread.tokens_used
        if used + cost + least > self.limits.thread_budget:
            raise self._exhausted(
                thread,
                "the messages do not fit the thread's budget",
                value=f"{cost + least} tokens with {used} used",
                limit=f"{self.limits.thread_budget} tokens",
                remedy="shorten the messages, rewind, or call done",
            )
        if self._model_room(thread) < cost + least:
            head = thread.head
            raise self._exhausted(
                thread,
                "the messages pass the model's positions or visible length",
                value=f"{cost + least} tokens after position "
                f"{head.next_position if head is not None else 0}",
                limit=f"{self._max_positions} positions, {self._max_visible} visible tokens",
                remedy="rewind, read less, or call done",
            )

    def check_fork(self, thread: Thread, branches: Mapping[str, str], taken: Sequence[str]) -> None:
        """Refuse a fork with bad names, too many threads or too much depth.

        Raises:
            InvalidRequest: No branch, or a name that is empty, reserved or taken.
            BudgetExhausted: `max_threads` or `max_depth` does not allow it.
        """
        if not branches:
            raise InvalidRequest(
                "fork without branches",
                value=0,
                limit="1 or more",
                remedy="name each child and give it its sub-task",
            )
        for name in branches:
            if not name.strip() or name == ROOT_THREAD or name in taken:
                raise InvalidRequest(
                    "branch name is empty, reserved or taken",
                    value=repr(name),
                    limit=f"a name other than {', '.join(taken)}",
                    remedy="choose another name; names stay taken for the whole episode",
                )
        children = len(taken) - 1
        if children + len(branches) > self.limits.max_threads:
            raise self._exhausted(
                thread,
                "the episode has too many threads",
                value=f"{len(branches)} more beside {children}",
                limit=f"{self.limits.max_threads} children",
                remedy="fork fewer branches, or open the episode with a higher max_threads",
            )
        if self.limits.max_depth is not None and thread.depth + 1 > self.limits.max_depth:
            raise self._exhausted(
                thread,
                "the fork is too deep",
                value=thread.depth + 1,
                limit=self.limits.max_depth,
                remedy="work in this thread, or open the episode with a higher max_depth",
            )

    def check_start(self, thread: Thread, base: Cursor, cost: int) -> None:
        """Refuse a fork whose child could not take a turn after `cost` tokens at `base`.

        Raises:
            BudgetExhausted: The model's positions or visible length, or the budget, end before.
        """
        needed = cost + self._least_turn
        model_ends = (
            base.next_position + needed > self._max_positions
            or base.num_visible + needed > self._max_visible
        )
        if model_ends or needed > self.limits.thread_budget:
            raise self._exhausted(
                thread,
                "a branch has no room for its sub-task",
                value=f"{needed} tokens after position {base.next_position}",
                limit=f"{self._max_positions} positions, {self._max_visible} visible tokens, "
                f"{self.limits.thread_budget} tokens of its own",
                remedy="fork from an earlier step with a shorter sub-task",
            )

    def check_mount(self, thread: Thread, new: Sequence[Mount], cost: int) -> None:
        """Refuse a mount after which no turn fits.

        Raises:
            BudgetExhausted: It passes the model's positions or visible length.
        """
        head = thread.head
        assert head is not None
        position = max([head.next_position, *(mount.next_position for mount in new)])
        visible = head.num_visible + sum(mount.num_tokens for mount in new)
        needed = cost + self._least_turn
        if position + needed > self._max_positions or visible + needed > self._max_visible:
            raise self._exhausted(
                thread,
                "the read passes the model's positions or visible length",
                value=f"position {position + needed}, {visible + needed} visible tokens",
                limit=f"{self._max_positions} positions, {self._max_visible} visible tokens",
                remedy="read fewer steps",
            )

    def reserve_note(self, thread: Thread, cost: int) -> Note | None:
        """The notice that the reserve is reached after `cost` more tokens, once on a path."""
        left = self.limits.thread_budget - thread.tokens_used - cost
        if not self.model_driven or left > self.limits.answer_reserve or thread.reserve_noted:
            return None
        self._metrics.add("guardrails/reserve_notes")
        return harness_note(notes.reserve_note(left, self._chat.preamble), is_reserve=True)

    def sampling_limit(self, thread: Thread, cost: int, *, in_reserve: bool) -> int:
        """Tokens that a turn may sample after appending `cost`; at least 1 once cost fits."""
        left = self.limits.thread_budget - thread.tokens_used - cost
        if self.model_driven and not in_reserve:
            left -= self.limits.answer_reserve
        return max(min(left, self._model_room(thread) - cost), 1)

    def roster_note(self, thread: Thread, threads: Sequence[Thread]) -> Note | None:
        """Branches that became readable since the path last said so; the first brings the tool."""
        if not self._reads:
            return None
        known, above = thread.known, set(thread.ancestors())
        steps: dict[str, int] = {}
        for other in threads:
            if other is thread or other.orphan or other in above or other.thread_id in known:
                continue
            lowest, highest = readable_steps(thread, other)
            if lowest <= highest:
                steps[other.thread_id] = highest
        if not steps:
            return None
        self._metrics.add("guardrails/roster_notes")
        text = notes.roster_note(steps, with_schema=not known, preamble=self._chat.preamble)
        return harness_note(text, announced=frozenset(steps))

    def after_turn(self, thread: Thread, calls: Sequence[ToolCall]) -> ThreadStatus | None:
        """End the thread where a limit is reached, or ask once for a missing call.

        Returns:
            The final status, or None where the thread goes on.
        """
        if not self.model_driven or any(c.name == "done" and not c.error for c in calls):
            return None
        status = self._limit_reached(thread)
        if status is None and not calls:
            status = self._prompt_termination(thread)
        if status is not None:
            self._metrics.add(f"guardrails/ended_{status}")
        return status

    def _limit_reached(self, thread: Thread) -> ThreadStatus | None:
        if thread.num_turns >= self.limits.max_turns:
            return ThreadStatus.MAX_TURNS
        left = self.limits.thread_budget - thread.tokens_used
        if min(left, self._model_room(thread)) < self._least_turn:
            return ThreadStatus.BUDGET
        return None

    def _prompt_termination(self, thread: Thread) -> ThreadStatus | None:
        if thread.termination_prompted:
            return ThreadStatus.NO_DONE
        thread.termination_prompted = True
        note = harness_note(notes.termination_note(self._chat.preamble), NodeKind.TERMINATION)
        cost = len(self._chat.delta([note.message])) + self._least_turn
        if min(self.limits.thread_budget - thread.tokens_used, self._model_room(thread)) < cost:
            return ThreadStatus.BUDGET
        self._metrics.add("guardrails/termination_prompts")
        thread.pending.append(note)
        return None

    def _model_room(self, thread: Thread) -> int:
        head = thread.head
        if head is None:
            return min(self._max_positions, self._max_visible)
        return min(self._max_positions - head.next_position, self._max_visible - head.num_visible)

    def _exhausted(
        self, thread: Thread, message: str, *, value: object, limit: object, remedy: str
    ) -> BudgetExhausted:
        self._metrics.add("guardrails/refused")
        return BudgetExhausted(
            message, value=value, limit=limit, remedy=remedy, thread_id=thread.thread_id
        )
