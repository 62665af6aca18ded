"""Runs four texts of 60 tokens in the engine of FOLDER's model, and gives one up at its third token. Prints, as JSON,
`after`: the tokens that it got after that; `left`: the texts that run and wait at the end; `same`: whether the others
are what each is alone.

Usage: python cancelled_texts.py FOLDER
"""

from __future__ import annotations

import json
import sys
import threading

import transformers

from ts.language.generation import Generator, Sampling, Step, Text

COUNT, AT = 60, 3
ended = threading.Semaphore(0)


def tell(steps: list[Step]) -> None:
    for step in steps:
        if step.text.index == 0 and len(step.text.given) == AT:
            step.text.cancelled = True
            ended.release()
        if step.finish_reason:
            ended.release()


def texts(which: range) -> list[Text]:
    sampling = Sampling(COUNT, frozenset(), temperature=0)
    return [Text(at, list(range(10, 14 + at)), sampling, tell) for at in which]


def run(generator: Generator, which: range) -> list[list[int]]:
    made = texts(which)
    generator.submit(made)
    for _ in made:
        ended.acquire(timeout=60)
    return [one.given for one in made]


transformers.utils.logging.disable_progress_bar()
engine = Generator(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), 8)
gone, *together = run(engine, range(4))
alone = [run(engine, range(at, at + 1))[0] for at in range(1, 4)]
print(json.dumps({"after": len(gone) - AT, "left": engine.counts, "same": together == alone}))
