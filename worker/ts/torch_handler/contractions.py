"""English contractions and their full forms, in lower case."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_IRREGULAR = {
    "ain't": "is not",
    "can't": "cannot",
    "can't've": "cannot have",
    "'cause": "because",
    "let's": "let us",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "shan't": "shall not",
    "won't": "will not",
    "y'all": "you all",
    "gonna": "going to",
    "wanna": "want to",
}
_NOT = "are could did does do had has have is might must need ought should was were would may dare"
_WILL = "he i it she that they this we what who you there how"
_HAVE = "could i might must should they we would you who what"
_IS = "he how it she so that there what when where who why here"

CONTRACTION_MAP: Mapping[str, str] = MappingProxyType(
    {
        **{f"{word}n't": f"{word} not" for word in _NOT.split()},
        **{f"{word}'ll": f"{word} will" for word in _WILL.split()},
        **{f"{word}'d": f"{word} would" for word in _WILL.split()},
        **{f"{word}'ve": f"{word} have" for word in _HAVE.split()},
        **{f"{word}'s": f"{word} is" for word in _IS.split()},
        **{f"{word}'re": f"{word} are" for word in ("they", "we", "you", "what", "who")},
        "i'm": "i am",
        **_IRREGULAR,
    }
)
