"""One answer out of the several of a streaming handler, for calls that have room for one: texts are joined."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Buffer
from ts_frontend.errors import Unimplemented

CONTENT_TYPE, BASE64 = "content_type", "base64"
_OF_MODEL = frozenset({"id", "model_name", "model_version"})


def refused(count: int) -> Unimplemented:
    """What a model that sent no answer, or several, is to a call that has room for one."""
    if not count:
        return Unimplemented("The model sent no answer: ask it by a call that streams")
    return Unimplemented(f"The model sent {count} answers where this call has one: ask it by a call that streams")


def joined_messages(pieces: Sequence[bytes]) -> bytes:
    """Several answers as one, when each is one text: their texts joined. Unimplemented for any other."""
    found = [pb.ModelInferResponse.FromString(piece) for piece in pieces]
    if not found:
        raise Unimplemented("The model sent no answer: ask it by ModelStreamInfer")
    for response in found:
        if [output.datatype for output in response.outputs] not in (["BYTES"], [""]):
            raise Unimplemented(
                f"The model sent {len(found)} answers, ModelInfer takes one: ask it by ModelStreamInfer"
            )
    last = found[-1]
    if last.raw_output_contents:
        bare = all(_is_bare(response) for response in found)
        texts = [response.raw_output_contents[0][0 if bare else 4 :] for response in found]
        joined = b"".join(texts)
        last.raw_output_contents[0] = joined if bare else len(joined).to_bytes(4, "little") + joined
        return last.SerializeToString()
    contents = last.outputs[0].contents
    texts = [b"".join(response.outputs[0].contents.bytes_contents) for response in found]
    points = [number for response in found for number in response.outputs[0].contents.int_contents]
    contents.ClearField("bytes_contents")
    contents.ClearField("int_contents")
    if points:
        contents.int_contents.extend(points)
    else:
        contents.bytes_contents.append(b"".join(texts))
    return last.SerializeToString()


def _is_bare(response: pb.ModelInferResponse) -> bool:
    """Whether its one element came without its length before it."""
    data = response.raw_output_contents[0]
    return len(data) < 4 or int.from_bytes(data[:4], "little") != len(data) - 4


def joined_json(pieces: Sequence[Buffer]) -> bytes:
    """The same for answers in JSON."""
    found = _read(pieces)
    if not found or any([one.get("datatype") for one in answer["outputs"]] != ["BYTES"] for answer in found):
        raise refused(len(found))
    last = found[-1]
    output = last["outputs"][0]
    data = b"".join(_bytes(one["outputs"][0]) for one in found)
    parameters = {name: value for name, value in output.get("parameters", {}).items() if name != CONTENT_TYPE}
    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text, parameters[CONTENT_TYPE] = base64.b64encode(data).decode(), BASE64
    output |= {"shape": [1], "data": [text]} | ({"parameters": parameters} if parameters else {})
    if not parameters:
        output.pop("parameters", None)
    return _written(last)


def _bytes(output: dict[str, Any]) -> bytes:
    """A text that ends in the middle of a character comes as base64."""
    if output.get("parameters", {}).get(CONTENT_TYPE) == BASE64:
        return b"".join(map(base64.b64decode, output["data"]))
    return "".join(output["data"]).encode("utf-8", "surrogatepass")


def _read(pieces: Sequence[Buffer]) -> list[dict[str, Any]]:
    """Unimplemented when there are tensors in binary after the JSON."""
    try:
        return [json.loads(bytes(piece)) for piece in pieces]
    except ValueError:
        raise refused(len(pieces)) from None


def _written(answer: dict[str, Any]) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(answer).encode()


def joined_generate(pieces: Sequence[Buffer]) -> bytes:
    """The same for answers of `generate`, flat or (to a V2 request) not: texts are joined, anything else is the last
    answer's."""
    found = _read(pieces)
    if not found or isinstance(found[0].get("outputs"), list):
        return joined_json(pieces)
    last = found[-1]
    for name, value in last.items():
        if isinstance(value, str) and name not in _OF_MODEL:
            last[name] = "".join(str(one.get(name, "")) for one in found)
    return _written(last)
