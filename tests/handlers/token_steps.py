"""One token per call for every request in progress, in the way of TorchServe's continuous batching example.

A body is `NAME COUNT [WORD]`; token n is `NAME:n/SIZE `, SIZE the number of requests of that step. WORD `once`
streams nothing, `raise` fails in its second step, `exit` ends the process there, `interrupt` interrupts the criterion
at its last token.
"""

import os
import time


class Tokens:
    def initialize(self, context):
        context.cache = {}
        self.size_max = context.system_properties["batch_size"]

    def handle(self, data, context):
        assert len(data) == len(context.request_ids) <= self.size_max
        if context.get_request_header(0, "describe"):
            return [{"kept": len(context.cache)}]
        ids = [context.request_ids[idx] for idx in range(len(data))]
        for gone in set(context.cache) - set(ids):
            del context.cache[gone]
        for request_id, row in zip(ids, data, strict=True):
            if request_id in context.cache:
                assert row == {}, row
            else:
                self.begin(context, request_id, row)
        time.sleep(0.001)
        context.stopping_criteria = [context.cache[request_id]["stop"] for request_id in ids]
        return [self.token(context, request_id, len(ids)) for request_id in ids]

    def begin(self, context, request_id, row):
        text = row.get("data") or row.get("body")
        name, count, *words = (text if isinstance(text, str) else bytes(text).decode()).split()
        stop = self.criterion(context.cache, request_id, int(count), words)
        context.cache[request_id] = {"name": name, "step": 0, "stop": stop, "words": words}

    def criterion(self, cache, request_id, count, words):
        """Called with each answer: True for the last, False for others, None for one that isn't streamed."""

        def stop(token):
            if words == ["interrupt"] and cache[request_id]["step"] == count:
                raise KeyboardInterrupt
            if words != ["once"] and cache[request_id]["step"] < count:
                return False
            del cache[request_id]
            return None if words == ["once"] else True

        return stop

    def token(self, context, request_id, size):
        state = context.cache[request_id]
        state["step"] += 1
        if state["words"] and state["step"] == 2:
            if state["words"] == ["raise"]:
                raise ValueError("asked to fail")
            if state["words"] == ["exit"]:
                os._exit(3)
        return f"{state['name']}:{state['step']}/{size} "
