"""An agent folder: `agent.py` with `tasks()`, `run(thread, task)` and `score(task, answer)`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from harness_sdk.errors import ConfigError
from harness_sdk.thread import Thread
from harness_sdk.types import PRIMITIVES, Limits, SamplingOptions

Task = Any
"""What `tasks()` yields: an object with an `id` or `task_id`, or a mapping with that key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What an agent folder defines."""

    name: str
    tasks: Callable[[], Iterable[Task] | AsyncIterable[Task]]
    """One pass; the same tasks in the same order each time, so that a run can go on in it."""
    run: Callable[[Thread, Task], Awaitable[object]]
    """Drives the root thread. Text that it returns is what is scored, in place of the answer, and
    the answer itself where the thread has not ended."""
    score: Callable[[Task, str], float | Awaitable[float]]
    """Outcome y in [0, 1] of a task's answer."""
    eval_tasks: Callable[[], Iterable[Task] | AsyncIterable[Task]] | None = None
    """What `octopus eval` scores in place of `tasks`, which may be trained on; `eval_tasks()` in
    agent.py, if it has one."""
    metrics: Callable[[Task, str], Mapping[str, float]] | None = None
    """What is reported beside the outcome; `metrics` in agent.py, if it has one."""
    limits: Limits | None = None
    """Budgets of its episodes: `LIMITS` in agent.py; None takes the service's."""
    primitives: tuple[str, ...] = PRIMITIVES
    """What its model is offered: `PRIMITIVES` in agent.py; all of them where it says nothing."""
    sampling: SamplingOptions | None = None
    """What turns take that say nothing else: `SAMPLING` in agent.py."""


def load_agent(folder: Path) -> Agent:
    """Import `agent.py` of `folder`.

    A folder that is a package (it has `__init__.py`) is imported under its dotted name, so that
    relative imports work; the files of any other folder import each other by their plain names.

    Raises:
        ConfigError: There is no agent.py, it cannot be imported, or a function is missing.
    """
    path = folder.resolve() / "agent.py"
    if not path.is_file():
        raise ConfigError(
            "no agent there", value=folder, limit="a folder with agent.py", remedy="check the path"
        )
    try:
        module = _import(path)
    except Exception as error:
        raise ConfigError(
            "agent.py cannot be imported",
            value=f"{type(error).__name__}: {error}",
            remedy=f"see {_place(error, path)}",
        ) from error
    for name in ("tasks", "run", "score"):
        if not callable(getattr(module, name, None)):
            raise ConfigError(
                f"agent.py does not define {name}()",
                value=path,
                limit="tasks(), async run(thread, task), score(task, answer)",
            )
    if not inspect.iscoroutinefunction(module.run):
        raise ConfigError("run() of agent.py is not async", value=path, remedy="async def run")
    for name, kind in (("LIMITS", Limits), ("SAMPLING", SamplingOptions)):
        given = getattr(module, name, None)
        if given is not None and not isinstance(given, kind):
            raise ConfigError(
                f"{name} of agent.py is of another type",
                value=f"{type(given).__name__} in {path}",
                limit=f"harness_sdk.{kind.__name__}",
            )
    return Agent(
        name=folder.resolve().name,
        tasks=module.tasks,
        run=module.run,
        score=module.score,
        eval_tasks=getattr(module, "eval_tasks", None),
        metrics=getattr(module, "metrics", None),
        limits=getattr(module, "LIMITS", None),
        primitives=tuple(getattr(module, "PRIMITIVES", PRIMITIVES)),
        sampling=getattr(module, "SAMPLING", None),
    )


def num_tasks(agent: Agent) -> int | None:
    """Tasks of one pass; None where the agent makes them one by one."""
    tasks = agent.tasks()
    return len(tasks) if isinstance(tasks, Sized) else None


def task_id(task: Task) -> str:
    """The id of a task.

    Raises:
        ConfigError: It has none.
    """
    given = cast(object, task)
    for name in ("id", "task_id"):
        if isinstance(given, Mapping):
            value = cast("Mapping[str, object]", given).get(name)
        else:
            value = getattr(given, name, None)
        if value is not None and value != "":
            return str(value)
    raise ConfigError(
        "a task has no id",
        value=str(task)[:200],
        remedy='yield objects with `id` or `task_id`, or dicts with the key "id"',
    )


async def outcome(agent: Agent, task: Task, answer: str) -> float:
    """The score of `answer`."""
    y = agent.score(task, answer)
    return float(await y if inspect.isawaitable(y) else y)


def _place(error: Exception, path: Path) -> str:
    """File and line of the folder's own code that raised `error`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(path.parent)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(path)


def _import(path: Path) -> ModuleType:
    root, names = path.parent, ["agent"]
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(names) > 1:
        return importlib.import_module(".".join(names))
    # Two folders may each have an agent.py: a name of its own keeps them apart.
    spec = importlib.util.spec_from_file_location(f"octopus_agent_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
