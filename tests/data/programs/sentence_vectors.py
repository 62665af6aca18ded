"""Prints, as JSON, the vectors that sentence-transformers makes of texts with the model in FOLDER.

Usage: python sentence_vectors.py FOLDER TEXT...
"""

from __future__ import annotations

import json
import sys

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps([model.encode(text).tolist() for text in sys.argv[2:]]))
