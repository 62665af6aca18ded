"""Calls of tools: the model `chat` asks for a function, this program runs it and sends the result, until there is an
answer in words. The first answer has to be a call.

Usage: python tools.py QUESTION [MODEL]
"""

import json
import os
import sys
from typing import Any

from openai import OpenAI

ROUNDS_MAX = 4


def fahrenheit(celsius: float) -> float:
    return round(celsius * 9 / 5 + 32, 1)


FUNCTIONS = {"fahrenheit": fahrenheit}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "fahrenheit",
            "description": "Converts degrees Celsius to Fahrenheit",
            "parameters": {
                "type": "object",
                "properties": {"celsius": {"type": "number"}},
                "required": ["celsius"],
                "additionalProperties": False,
            },
        },
    }
]

address = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
client = OpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = sys.argv[2] if len(sys.argv) > 2 else "chat"
messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]

for at in range(ROUNDS_MAX):
    choice: Any = "auto" if at else "required"
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=200
    )
    message: Any = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        try:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        except (LookupError, TypeError, ValueError) as error:
            result = f"{type(error).__name__}: {error}"  # the model may correct its call
        print(f"{call.function.name} {call.function.arguments} -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
