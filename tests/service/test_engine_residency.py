"""The residency store: sharing, pins, eviction order, and the order of a rebuild."""

from __future__ import annotations

import torch

from rollout_service.cursors import Cursor, Mount, child_cursor
from rollout_service.engine.transformers.residency import (
    Residency,
    ResidencyStore,
    rebuild_order,
)


def cursor(parent: Cursor | None, *tokens: int, mounts: tuple[Mount, ...] = ()) -> Cursor:
    return child_cursor(parent, tokens, mounts=mounts, policy_version=0)


def residency(num_tokens: int) -> Residency:
    return Residency(num_tokens=num_tokens, keys_values=[], states={}, last_hidden=torch.zeros(1))


def put(store: ResidencyStore, *cursors: Cursor, version: int = 0) -> None:
    for one in cursors:
        store.put(version, one, residency(len(one.token_ids)))


def test_identical_roots_share_until_the_last_goes() -> None:
    store = ResidencyStore(100)
    one, same, other = cursor(None, 1, 2), cursor(None, 1, 2), cursor(None, 1, 3)
    put(store, one)
    assert store.is_complete(0, same)
    assert not store.is_complete(0, other)
    assert not store.is_complete(1, same)
    assert (len(store), store.num_tokens, store.num_states) == (2, 2, 1)
    put(store, cursor(None, 1, 2))
    assert store.num_tokens == 2
    store.release([one])
    assert store.num_tokens == 2
    assert store.is_complete(0, same)
    store.drop_version(0)
    assert (len(store), store.num_tokens, store.num_states) == (0, 0, 0)
    assert not store.is_complete(0, cursor(None, 1, 2))


def test_roots_that_mount_are_not_shared() -> None:
    store = ResidencyStore(100)
    source = cursor(None, 9)
    one = cursor(None, 1, 2, mounts=(Mount(source=source, begin=0, end=1),))
    put(store, one)
    assert not store.is_complete(0, cursor(None, 1, 2))


def test_trailing_residency_is_replaced_in_the_count() -> None:
    store = ResidencyStore(100)
    root = cursor(None, 1, 2)
    turn = cursor(root, 3, 4, 5)
    put(store, root)
    store.put(0, turn, residency(2))
    assert not store.is_complete(0, turn)
    assert store.num_tokens == 4
    store.put(0, turn, residency(3))
    assert store.is_complete(0, turn)
    assert (store.num_tokens, store.num_states) == (5, 2)


def test_oldest_unpinned_goes_first_and_pinned_never() -> None:
    store = ResidencyStore(6)
    a, b, c = (cursor(None, token, token) for token in (1, 2, 3))
    put(store, a, b, c)
    store.touch(0, [a])
    store.pin([(0, b.cursor_id)])
    assert store.reserve(2)
    assert [store.is_complete(0, one) for one in (a, b, c)] == [True, True, False]
    assert store.num_evicted(0, c) == 2
    assert store.reserve(2)
    assert not store.is_complete(0, a)
    assert not store.reserve(2)
    store.evict([b])
    assert store.is_complete(0, b)
    store.unpin([(0, b.cursor_id)])
    assert store.reserve(2)
    assert (store.num_tokens, store.tokens_used) == (0, 6)


def test_release_under_a_pin_waits_for_the_reader() -> None:
    store = ResidencyStore(10)
    a = cursor(None, 1, 2)
    put(store, a)
    store.pin([(0, a.cursor_id)])
    store.pin([(0, a.cursor_id)])
    store.release([a])
    store.unpin([(0, a.cursor_id)])
    assert store.is_complete(0, a)
    store.unpin([(0, a.cursor_id)])
    assert (len(store), store.num_tokens) == (0, 0)


def test_release_forgets_evicted_cursors() -> None:
    store = ResidencyStore(10)
    a = cursor(None, 1, 2)
    put(store, a)
    store.evict([a])
    assert store.num_evicted(0, a) == 2
    store.release([a])
    assert store.num_evicted(0, a) == 0


def test_rebuild_takes_dependencies_first_and_each_once() -> None:
    root = cursor(None, 1)
    producer = cursor(root, 2)
    reader = cursor(root, 3, mounts=(Mount(source=producer, begin=0, end=1),))
    tail = cursor(reader, 4, mounts=reader.mounts)
    other = cursor(producer, 5, mounts=(Mount(source=tail, begin=0, end=1),))
    assert rebuild_order([other], lambda _: False) == [root, producer, reader, tail, other]
    resident = {root, reader}
    assert rebuild_order([other], lambda c: c in resident) == [producer, tail, other]
    assert rebuild_order([reader], lambda c: c is reader) == []


def test_rebuild_of_a_deep_chain_does_not_recurse() -> None:
    chain = [cursor(None, 1)]
    for _ in range(1500):
        chain.append(cursor(chain[-1], 1))
    assert rebuild_order([chain[-1]], lambda _: False) == chain
