"""What a check of `octopus doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness_sdk.errors import HarnessError
from harness_sdk.printable import printable

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    level: Level
    text: str
    remedy: str = ""
    """What to do about it; a line that is ok may have one too, for what it leaves out."""

    def line(self) -> str:
        """The check as it is printed."""
        remedy = f"; fix: {self.remedy}" if self.remedy else ""
        # What servers and files said is in it.
        told = " ".join(f"{self.name}: {self.text}{remedy}".split())
        return printable(f"{self.level:4}   {told}")


def failed(name: str, error: HarnessError) -> Check:
    """A check that ended with an error of ours."""
    text = " ".join(filter(None, (error.message, error.value)))
    return Check(name=name, level="fail", text=text, remedy=error.remedy)
