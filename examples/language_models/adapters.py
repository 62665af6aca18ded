"""A text by a model, and by the same model with an adapter (LoRA) that is loaded for it and unloaded again.

Usage: python adapters.py MODEL ADAPTER FOLDER PROMPT
"""

import json
import os
import sys
from urllib.request import Request, urlopen

from openai import OpenAI

address = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
client = OpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY", "none"))
model, adapter, folder, prompt = sys.argv[1:]
adapters = f"{os.environ.get('MANAGEMENT_URL', 'http://127.0.0.1:8081')}/models/{model}/adapters"
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('MANAGEMENT_KEY', 'none')}"}


def text(name: str) -> str:
    answer = client.completions.create(model=name, prompt=prompt, max_tokens=24, temperature=0)
    return answer.choices[0].text


urlopen(Request(adapters, json.dumps({"name": adapter, "src": folder}).encode(), headers, method="POST")).close()
for name in (model, adapter):
    print(f"{name}: {text(name)!r}")
urlopen(Request(f"{adapters}/{adapter}", headers=headers, method="DELETE")).close()
