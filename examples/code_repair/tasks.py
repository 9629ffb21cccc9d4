"""The functions to repair. What a test expects is a value, compared outside the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tests = tuple[tuple[str, Any], ...]
"""Expression and the value that it must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTask:
    """One broken module."""

    id: str
    description: str
    source: str
    visible: Tests
    """Shown, and run by `run_tests`."""
    hidden: Tests
    """Decide the reward, with the visible ones."""


TASKS = (
    RepairTask(
        id="median",
        description="median(numbers): the middle value; the mean of the two middle ones if even.",
        source="""\
def median(numbers):
    numbers = sorted(numbers)
    return numbers[len(numbers) // 2]
""",
        visible=(("median([3, 1, 2])", 2), ("median([1, 2, 3, 4])", 2.5)),
        hidden=(("median([5])", 5), ("median([4, 1])", 2.5), ("median([-1, -3, -2, -9])", -2.5)),
    ),
    RepairTask(
        id="rotate",
        description="rotate(items, k): the list turned right by k places; k may be any integer.",
        source="""\
def rotate(items, k):
    return items[-k:] + items[:-k]
""",
        visible=(("rotate([1, 2, 3], 1)", [3, 1, 2]), ("rotate([1, 2, 3], 4)", [3, 1, 2])),
        hidden=(
            ("rotate([], 3)", []),
            ("rotate([1, 2, 3], 0)", [1, 2, 3]),
            ("rotate([1, 2, 3], -1)", [2, 3, 1]),
            ("rotate([1, 2, 3], 300)", [1, 2, 3]),
        ),
    ),
    RepairTask(
        id="roman",
        description="roman(n): n from 1 to 3999 in Roman numerals, 4 as IV and 9 as IX.",
        source="""\
NUMERALS = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]

def roman(n):
    text = ""
    for value, letter in NUMERALS:
        while n >= value:
            text += letter
            n -= value
    return text
""",
        visible=(("roman(6)", "VI"), ("roman(4)", "IV")),
        hidden=(("roman(1994)", "MCMXCIV"), ("roman(49)", "XLIX"), ("roman(3999)", "MMMCMXCIX")),
    ),
    RepairTask(
        id="brackets",
        description="balanced(text): whether (), [] and {} close in the right order.",
        source="""\
def balanced(text):
    return all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}"))
""",
        visible=(("balanced('a(b[c])')", True), ("balanced(')(')", False)),
        hidden=(
            ("balanced('([)]')", False),
            ("balanced('(]')", False),
            ("balanced('')", True),
            ("balanced('{[()()]}')", True),
            ("balanced('((')", False),
        ),
    ),
    RepairTask(
        id="runs",
        description="runs(text): (character, length) of each run of equal characters, in order.",
        source="""\
def runs(text):
    found, start = [], 0
    for at in range(1, len(text)):
        if text[at] != text[start]:
            found.append((text[start], at - start))
            start = at
    return found
""",
        visible=(("runs('aab')", [("a", 2), ("b", 1)]),),
        hidden=(
            ("runs('')", []),
            ("runs('zzz')", [("z", 3)]),
            ("runs('aba')", [("a", 1), ("b", 1), ("a", 1)]),
        ),
    ),
    RepairTask(
        id="bisect",
        description="find(items, wanted): its index in a sorted list, -1 where it is not there.",
        source="""\
def find(items, wanted):
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle
        else:
            high = middle
    return -1
""",
        visible=(("find([1, 3, 5], 3)", 1), ("find([1, 3, 5], 4)", -1)),
        hidden=(
            ("find([], 1)", -1),
            ("find([1, 3, 5], 5)", 2),
            ("find([1, 3, 5], 9)", -1),
            ("find(list(range(1000)), 617)", 617),
        ),
    ),
    RepairTask(
        id="intervals",
        description="merged(intervals): overlapping or touching [begin, end] as one, sorted.",
        source="""\
def merged(intervals):
    found = []
    for begin, end in sorted(intervals):
        if found and begin < found[-1][1]:
            found[-1][1] = end
        else:
            found.append([begin, end])
    return found
""",
        visible=(
            ("merged([[1, 3], [2, 5]])", [[1, 5]]),
            ("merged([[1, 2], [2, 4]])", [[1, 4]]),
        ),
        hidden=(
            ("merged([[1, 9], [2, 3]])", [[1, 9]]),
            ("merged([[5, 6], [1, 2]])", [[1, 2], [5, 6]]),
            ("merged([])", []),
        ),
    ),
    RepairTask(
        id="duration",
        description="seconds(text): of a duration like 2h, 1h30m or 1m5s; h, m and s in any order.",
        source="""\
import re

def seconds(text):
    total = 0
    for number, unit in re.findall(r"(\\d)([hms])", text):
        total += int(number) * {"h": 3600, "m": 60, "s": 1}[unit]
    return total
""",
        visible=(("seconds('2h')", 7200), ("seconds('1h30m')", 5400)),
        hidden=(("seconds('45s')", 45), ("seconds('10m100s')", 700), ("seconds('5s1h')", 3605)),
    ),
    RepairTask(
        id="wrap",
        description="wrap(text, width): lines of whole words, each at most width characters.",
        source="""\
def wrap(text, width):
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append(word)
        else:
            lines[-1] += " " + word
    return lines
""",
        visible=(("wrap('aa bb cc', 5)", ["aa bb", "cc"]),),
        hidden=(
            ("wrap('a', 9)", ["a"]),
            ("wrap('aaa bbb', 6)", ["aaa", "bbb"]),
            ("wrap('aaa bbb', 7)", ["aaa bbb"]),
            ("wrap('a b c d', 3)", ["a b", "c d"]),
        ),
    ),
    RepairTask(
        id="flatten",
        description="flat(items): the leaves of nested lists and tuples; strings are leaves.",
        source="""\
def flat(items):
    found = []
    for item in items:
        if isinstance(item, list):
            found += item
        else:
            found.append(item)
    return found
""",
        visible=(("flat([1, [2, 3]])", [1, 2, 3]), ("flat([1, [2, [3]]])", [1, 2, 3])),
        hidden=(
            ("flat(['ab', ['cd']])", ["ab", "cd"]),
            ("flat([(1, [2]), []])", [1, 2]),
            ("flat([])", []),
        ),
    ),
    RepairTask(
        id="collect",
        description="collect(item, into): append to the list and return it; a new list if none.",
        source="""\
def collect(item, into=[]):
    into.append(item)
    return into
""",
        visible=(("collect(1)", [1]), ("collect(2)", [2])),
        hidden=(
            ("[collect(1), collect(2)]", [[1], [2]]),
            ("collect(3, [1])", [1, 3]),
            ("(lambda own: (collect(4, own), own)[1])([])", [4]),
        ),
    ),
    RepairTask(
        id="order",
        description="order(needs): the names, each after those that it needs, the first by name of "
        "those that may come next; None for a cycle. needs maps a name to the names it needs.",
        source="""\
def order(needs):
    found = []
    left = dict(needs)
    while left:
        ready = [name for name in left if all(each in found for each in left[name])]
        found.append(min(ready))
        del left[found[-1]]
    return found
""",
        visible=(
            ("order({'b': ['a'], 'a': []})", ["a", "b"]),
            ("order({'a': ['b'], 'b': ['a']})", None),
        ),
        hidden=(
            ("order({})", []),
            ("order({'c': ['a', 'b'], 'b': [], 'a': []})", ["a", "b", "c"]),
            ("order({'b': ['d'], 'd': [], 'c': []})", ["c", "d", "b"]),
            ("order({'a': [], 'b': ['b']})", None),
        ),
    ),
)
