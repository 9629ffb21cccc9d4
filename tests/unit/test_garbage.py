"""Garbage collection around what is loaded."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from harness_sdk.interpreter import uncollected
from rollout_service.interpreter import seldom_collected
from trainer_service.garbage import loaded_is_kept


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def test_what_is_loaded_is_passed_over_until_the_end() -> None:
    loaded = _Cycle()
    before, kept = weakref.ref(loaded), gc.get_freeze_count()
    with pytest.raises(ValueError, match="step"), loaded_is_kept():
        assert gc.get_freeze_count() > kept + 1000
        del loaded
        fresh = weakref.ref(_Cycle())
        gc.collect()
        assert fresh() is None and before() is not None
        raise ValueError("a step failed")
    gc.collect()
    assert (gc.get_freeze_count(), before()) == (0, None)


def test_a_service_collects_seldom_while_it_serves() -> None:
    before, kept = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(ValueError, match="turn"), seldom_collected():
        assert gc.get_threshold() == (20_000, *before[1:])
        assert gc.get_freeze_count() > kept + 1000
        raise ValueError("a turn failed")
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_imports_are_not_searched_and_what_comes_after_is() -> None:
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError("no module")
    assert gc.isenabled()


def test_a_process_that_leaves_has_written_and_done_all_that_was_left_for_its_end() -> None:
    code = (
        "import atexit, sys\nfrom harness_sdk.interpreter import leave\n"
        "class Held:\n    def __del__(self): print('taken apart')\n"
        "held = Held()\natexit.register(print, 'last words')\nprint('first', end=' ')\nleave(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "first last words\n", "")
