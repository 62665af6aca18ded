"""A search by meaning: the lines of a file in the order of how well they fit a question, by the model `embed`.

Usage: python search.py FILE QUESTION
"""

import os
import sys
from pathlib import Path

from openai import OpenAI

address = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
client = OpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY", "none"))

lines = [line for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
found = client.embeddings.create(model="embed", input=[*lines, sys.argv[2]], encoding_format="float").data
*vectors, asked = [one.embedding for one in found]


def fit(vector: list[float]) -> float:
    """The cosine of the angle to the question; the vectors have the length 1."""
    return sum(one * other for one, other in zip(vector, asked, strict=True))


for score, line in sorted(zip(map(fit, vectors), lines, strict=True), reverse=True):
    print(f"{score:.3f}  {line}")
