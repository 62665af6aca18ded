"""Keeps a sum for each sequence, as TorchServe's stateful examples do: bodies are numbers, and "=" asks for the sum.

`wait:PATH` waits until the file is there, `exit` ends the process, `end:ID` ends a sequence by an answer's header.
"""

import json
import os
import time
from pathlib import Path


class Sums:
    def initialize(self, context):
        self.sums = {}

    def handle(self, data, context):
        if context.get_request_header(0, "describe"):
            return [{"sequences": sorted(self.sums), "ids": [context.get_sequence_id(0)]}]
        return [self.one(idx, row, context) for idx, row in enumerate(data)]

    def one(self, idx, row, context):
        sequence = context.get_sequence_id(idx)
        text = row.get("data") or row.get("body")
        text = text if isinstance(text, str) else bytes(text).decode()
        word, _, rest = text.partition(":")
        if word == "wait":
            Path(rest + ".begun").touch()
            while not Path(rest).exists():
                time.sleep(0.002)
        elif word == "exit":
            os._exit(3)
        elif word == "end":
            context.set_response_header(idx, context.header_key_sequence_end, rest)
        elif word == "fail":
            raise ValueError("asked to fail")
        elif word != "=":
            self.sums.setdefault(sequence, []).append(int(word))
        return json.dumps(
            {
                "sequence": sequence,
                "numbers": self.sums.get(sequence, []),
                "pid": os.getpid(),
                "batch": len(context.request_ids),
                "start": context.get_request_header(idx, context.header_key_sequence_start),
                "end": context.get_request_header(idx, context.header_key_sequence_end),
            }
        )
