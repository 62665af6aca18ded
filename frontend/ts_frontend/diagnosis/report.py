"""Reports: findings in sections, as text for people and as JSON for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: The most lines shown below a finding, such as the end of a traceback.
DETAIL_LINES_MAX = 30


class Severity(Enum):
    """A warning deserves attention; with an error the model, or the server, doesn't run."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `about`: its subject, a word; `text`: finding and advice; `detail`: lines below it."""

    severity: Severity
    about: str
    text: str
    detail: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "severity": self.severity.value,
            "about": self.about,
            "text": self.text,
            **({"detail": list(self.detail)} if self.detail else {}),
        }


@dataclass(slots=True)
class Section:
    """The findings about one subject, such as a model. `facts`: measured values, for programs, with their units in
    their names. `counted`: the section counts as one of the report's subjects."""

    title: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    counted: bool = True

    def ok(self, about: str, text: str) -> None:
        self.findings.append(Finding(Severity.OK, about, text))

    def warn(self, about: str, text: str) -> None:
        found = Finding(Severity.WARNING, about, text)
        if not any(found.text == other.text for other in self.findings):
            self.findings.append(found)

    def error(self, about: str, text: str, detail: Iterable[str] = ()) -> None:
        self.findings.append(Finding(Severity.ERROR, about, text, tuple(detail)[-DETAIL_LINES_MAX:]))

    def count(self, severity: Severity) -> int:
        return sum(one.severity is severity for one in self.findings)

    @property
    def failed(self) -> bool:
        return self.count(Severity.ERROR) > 0


@dataclass(slots=True)
class Report:
    """The findings in sections. `subject`: the word for a section in the last line (model, area)."""

    subject: str
    sections: list[Section] = field(default_factory=list)

    def section(self, title: str) -> Section:
        self.sections.append(Section(title))
        return self.sections[-1]

    def count(self, severity: Severity) -> int:
        return sum(section.count(severity) for section in self.sections)

    def status(self, *, strict: bool = False) -> int:
        return int(self.count(Severity.ERROR) > 0 or (strict and self.count(Severity.WARNING) > 0))

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.count(Severity.ERROR),
            "errors": self.count(Severity.ERROR),
            "warnings": self.count(Severity.WARNING),
            "sections": [
                {
                    "title": section.title,
                    "findings": [finding.as_json() for finding in section.findings],
                    "facts": dict(sorted(section.facts.items())),
                }
                for section in self.sections
            ],
        }

    def text(self, *, quiet: bool = False) -> str:
        """The report line by line; `quiet`: only warnings and errors."""
        lines: list[str] = []
        for section in self.sections:
            shown = [one for one in section.findings if not (quiet and one.severity is Severity.OK)]
            if shown:
                lines += [section.title, *(line for one in shown for line in _lines(one))]
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        errors, warnings = self.count(Severity.ERROR), self.count(Severity.WARNING)
        found = ", ".join(_counted(count, what) for count, what in ((errors, "error"), (warnings, "warning")) if count)
        return f"{_counted(sum(section.counted for section in self.sections), self.subject)}: {found or 'no faults'}"


def _lines(finding: Finding) -> Iterator[str]:
    first, *more = finding.text.splitlines() or [""]
    yield f"  {finding.severity.value:<7}  {finding.about}: {first}"
    for line in (*more, *finding.detail):
        yield f"             {line}".rstrip()


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def size(count: float) -> str:
    """Bytes for people: `831 B`, `2.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
