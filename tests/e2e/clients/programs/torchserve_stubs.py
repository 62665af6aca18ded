"""TorchServe's APIs, with our own client: predictions, and a stream, beside everybody else's."""

import sys

from torchrelay_client import Client

with Client(sys.argv[1]) as client:
    assert client.predict("upper", b"text") == b"TEXT"
    assert list(client.predict_stream("text-model", "one two"))[:2] == [b"one ", b"two "]
    assert client.infer("llm_model", {"text_input": [["grün"]]})["text_output"].ravel()[0].decode() == "GRÜN"
print("torchserve ok")
