"""A chat in the terminal with the model `chat`, which remembers what was said. An answer appears token by token.

Usage: python chat.py   (questions are lines of the standard input)
"""

import os
import sys

from openai import OpenAI

address = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
client = OpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY", "none"))
messages = [{"role": "system", "content": "You answer with one sentence."}]

print("> ", end="", flush=True)
for question in sys.stdin:
    messages.append({"role": "user", "content": question.strip()})
    answer = ""
    for piece in client.chat.completions.create(
        model="chat", messages=messages, stream=True, temperature=0, max_tokens=200
    ):
        if piece.choices:
            text = piece.choices[0].delta.content or ""
            answer += text
            print(text, end="", flush=True)
    messages.append({"role": "assistant", "content": answer})
    print("\n> ", end="", flush=True)
