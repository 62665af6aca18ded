"""Models of torch in one file: TorchScript (model.pt of backend `pytorch`), programs of torch.export and packages of
AOTInductor (.pt2), and modules without declared tensors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ts.compat.triton_backend.edges import Fields
from ts.compat.triton_backend.messages import TritonModelException, bytes_of, of_config, texts
from ts.protocol.datatypes import OF_ARRAY_TYPE
from ts.runtime.handlers import HandlerNotUsable
from ts.tensors.types import BadTensor, Tensor
from ts.tensors.v1_form import GUESSED
from ts.utils.util import PredictionException

_INDEXED = re.compile(r".+__([0-9]+)")
#: Names of outputs that a module doesn't name, as in Triton's repositories.
OUTPUT = "output__{}"
NUMBERS = "send numbers as JSON, such as [[1, 2]], as CSV, .npy, or as a tensor"


def opened(file: Path, config: Fields, gpu_id: int | None) -> TorchScript | Exported:
    """Opens the model of backend `pytorch`. Raises HandlerNotUsable if neither it nor the configuration declares its
    tensors, or if the configuration doesn't fit it."""
    return exported(file, config, gpu_id) if file.suffix == ".pt2" else _torchscript(file, config, gpu_id)


def device_of(gpu_id: int | None) -> Any:
    import torch

    return torch.device("cpu" if gpu_id is None else f"cuda:{gpu_id}")


def _torchscript(file: Path, config: Fields, gpu_id: int | None) -> TorchScript:
    for kind in ("input", "output"):
        if not config.get(kind):
            raise HandlerNotUsable(f"backend pytorch needs each {kind} in config.pbtxt: TorchScript doesn't say them")
    from ts.torch_handler.model_files import load_torchscript

    device = device_of(gpu_id)
    return TorchScript(load_torchscript(file, device), config, device)


class TorchScript:
    """Inputs go to arguments of their names, `NAME__INDEX` to that argument, others in the configuration's order."""

    def __init__(self, module: Any, config: Fields, device: Any) -> None:
        self.config = config
        self._module, self._device = module, device
        arguments = list(module.forward.schema.arguments)[1:]
        self._takes_dict = len(arguments) == 1 and arguments[0].type.kind() == "DictType"
        names = [one["name"] for one in config["input"]]
        self._positions = positions(names, [one.name for one in arguments])
        if not self._takes_dict and max(self._positions.values()) >= len(arguments):
            raise HandlerNotUsable(
                f"the configuration has {len(names)} inputs, {', '.join(names)}; forward takes: "
                f"{', '.join(one.name for one in arguments)}"
            )
        self._outputs = positions([one["name"] for one in config["output"]], [])
        self._texts = {one["name"] for one in config["output"] if of_config(one["data_type"]) == "BYTES"}
        for kind in ("input", "output"):
            for one in config[kind]:
                _check_texts(kind, one, int(config.get("max_batch_size") or 0) > 0)
        for one in config["input"]:
            self._check_argument(one, arguments)

    def _check_argument(self, tensor: Fields, arguments: Sequence[Any]) -> None:
        """Raises HandlerNotUsable for BYTES if `forward` doesn't take texts, because tensors can't hold them."""
        if of_config(tensor["data_type"]) != "BYTES":
            return
        argument = arguments[0 if self._takes_dict else self._positions[tensor["name"]]]
        if str(argument.type) != "List[str]":
            raise HandlerNotUsable(
                f"input {tensor['name']!r} is of BYTES, which TorchScript takes as List[str]; the argument "
                f"{argument.name!r} of forward is of type {argument.type}"
            )

    def run(self, inputs: Sequence[Tensor], wanted: Sequence[str]) -> list[Tensor]:
        import torch

        given = {one.name: self._in(one) for one in inputs}
        with torch.inference_mode():
            if self._takes_dict:
                found = self._module(given)
            else:
                order = sorted(given, key=self._positions.__getitem__)
                found = self._module(*(given[name] for name in order))
        return self._out(found)

    def _in(self, tensor: Tensor) -> Any:
        if tensor.datatype == "BYTES":
            return texts(tensor).tolist()
        return tensor.as_torch().to(self._device)

    def _out(self, found: Any) -> list[Tensor]:
        if isinstance(found, dict):
            return [self._tensor(name, found[name]) for name in self._outputs if name in found]
        several = isinstance(found, tuple) or (isinstance(found, list) and not self._is_texts(found))
        values = list(found) if several else [found]
        if max(self._outputs.values()) >= len(values):
            raise TritonModelException(
                f"the model gave {len(values)} outputs; its configuration has: {', '.join(self._outputs)}"
            )
        return [self._tensor(name, values[position]) for name, position in self._outputs.items()]

    def _is_texts(self, found: list[Any]) -> bool:
        """Whether a list is a single output of texts. An empty list is, if the output is declared as BYTES."""
        return isinstance(found[0], str) if found else len(self._outputs) == len(self._texts) == 1

    def _tensor(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, list):
            return Tensor.of(name, value)
        if not all(isinstance(one, str) for one in value):
            raise TritonModelException(f"output {name!r} is a list that has other things than texts in it")
        array = np.empty(len(value), dtype=object)
        array[:] = value
        return bytes_of(name, array)


def _check_texts(kind: str, tensor: Fields, batched: bool) -> None:
    """Raises HandlerNotUsable for BYTES with several dimensions, because TorchScript has only lists of texts."""
    reshape = tensor.get("reshape")
    dims = tensor["dims"] if reshape is None else reshape.get("shape") or []
    if of_config(tensor["data_type"]) == "BYTES" and len(dims) + batched > 1:
        hint = "; with max_batch_size, that is the batch: write reshape { shape: [ ] }" if batched else ""
        raise HandlerNotUsable(
            f"{kind} {tensor['name']!r} is of BYTES and has {len(dims) + batched} dimensions: TorchScript has them as "
            f"List[str], of one dimension{hint}"
        )


def positions(names: Sequence[str], arguments: Sequence[str]) -> dict[str, int]:
    """The position of each name: all by name, or all by index, or all in order, whichever fits first."""
    if names and all(name in arguments for name in names):
        return {name: arguments.index(name) for name in names}
    indexes = [_INDEXED.fullmatch(name) for name in names]
    if all(indexes):
        return {name: int(found[1]) for name, found in zip(names, indexes, strict=True) if found}
    return {name: position for position, name in enumerate(names)}


# --- torch.export


def exported(file: Path, config: Fields, gpu_id: int | None) -> Exported:
    """Opens a program of torch.export, or a package of AOTInductor. Raises HandlerNotUsable if neither it nor the
    configuration declares its tensors."""
    import torch

    from ts.torch_handler.model_files import is_compiled_package, load_exported

    device = device_of(gpu_id)
    if not is_compiled_package(file):
        program = torch.export.load(str(file))
        inputs, outputs = _declared(program)
        if device.type != "cpu":
            program = torch.export.passes.move_to_device_pass(program, device)
        batched = int(config.get("max_batch_size") or 0) > 0
        whole = config | {
            "platform": config.get("platform") or "torch_export",
            "input": config.get("input") or _inner(inputs, batched),
            "output": config.get("output") or _inner(outputs, batched),
        }
        return Exported(program.module(), whole, [one["name"] for one in inputs], device)
    for kind in ("input", "output"):
        if not config.get(kind):
            raise HandlerNotUsable(f"{file.name} is machine code, which doesn't say its tensors: declare each {kind}")
    return Exported(load_exported(file, device), config, [one["name"] for one in config["input"]], device)


class Exported:
    """Arguments are named as the exported `forward`'s; an output is `output__INDEX` without a configured name."""

    def __init__(self, module: Any, config: Fields, arguments: Sequence[str], device: Any) -> None:
        self.config = config
        self._module, self._device = module, device
        self._positions = positions([one["name"] for one in config["input"]], arguments)
        self._outputs = [one["name"] for one in config["output"]]

    def run(self, inputs: Sequence[Tensor], wanted: Sequence[str]) -> list[Tensor]:
        import torch
        from torch.utils import _pytree

        order = sorted(inputs, key=lambda one: self._positions[one.name])
        with torch.inference_mode():
            found = self._module(*(one.as_torch().to(self._device) for one in order))
        values = [one for one in _pytree.tree_leaves(found) if hasattr(one, "detach")]
        if len(values) < len(self._outputs):
            raise TritonModelException(
                f"the model gave {len(values)} outputs; its configuration has: {', '.join(self._outputs)}"
            )
        return [Tensor.of(name, value) for name, value in zip(self._outputs, values, strict=False)]


def _declared(program: Any) -> tuple[list[Fields], list[Fields]]:
    """The tensor inputs and outputs of a program, in order, with whole shapes."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [_field(name, values[name]) for name in program.graph_signature.user_inputs if name in values]
    made = [values.get(name) for name in program.graph_signature.user_outputs]
    tensors = [value for value in made if hasattr(value, "shape")]
    return inputs, [_field(f"output__{index}", value) for index, value in enumerate(tensors)]


def _field(name: str, value: Any) -> Fields:
    kind = OF_ARRAY_TYPE.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
    if kind is None:
        raise HandlerNotUsable(f"{name!r} of the program is not a tensor with a datatype: {type(value).__name__}")
    dims = [size if isinstance(size, int) else -1 for size in value.shape]
    return {"name": name, "data_type": kind.config_type, "dims": dims}


def _inner(tensors: Sequence[Fields], batched: bool) -> list[Fields]:
    """A shape without the batch dimension, which a configuration with max_batch_size leaves out."""
    return [{**one, "dims": one["dims"][1:]} if batched else one for one in tensors]


# --- modules


class TorchModule:
    """A module without declared tensors: requests determine the datatypes and shapes. Inputs go to arguments of their
    names, `NAME__INDEX` to that argument, others in their order. Numbers without a datatype get that of the module's
    weights; integers stay integers if it has an embedding. `tokenizer`: makes the arguments from an input of texts."""

    def __init__(self, module: Any, arguments: Sequence[str], device: Any, tokenizer: Any = None) -> None:
        self.config: Fields = {"platform": "pytorch_libtorch"}
        self._module, self._arguments, self._device = module, list(arguments), device
        self._tokenizer = tokenizer
        weights = next((one for one in module.parameters() if one.is_floating_point()), None)
        self._dtype = None if weights is None else weights.dtype
        kinds = {str(getattr(one, "original_name", type(one).__name__)) for one in module.modules()}
        self._takes_whole = any("Embedding" in kind for kind in kinds)

    @classmethod
    def of(cls, module: Any, device: Any, tokenizer: Any = None) -> TorchModule:
        return cls(module, list(inspect.signature(module.forward).parameters), device, tokenizer)

    def run(self, inputs: Sequence[Tensor], wanted: Sequence[str]) -> list[Tensor]:
        import torch

        found = self._given(inputs)
        with torch.inference_mode():
            if isinstance(found, dict):
                return list(_named(self._module(**found)))
            return list(_named(self._module(*found)))

    def _given(self, inputs: Sequence[Tensor]) -> dict[str, Any] | list[Any]:
        """The arguments, by name if the inputs have arguments' names."""
        if len(inputs) == 1 and inputs[0].datatype == "BYTES":
            return self._tokens(inputs[0])
        names = [one.name for one in inputs]
        values = {one.name: self._in(one) for one in inputs}
        if all(name in self._arguments for name in names):
            return values
        if len(values) > len(self._arguments):
            takes = ", ".join(self._arguments)
            raise _refused(f"the request has {len(values)} inputs, {', '.join(names)}; forward takes: {takes}")
        order = positions(names, self._arguments)
        return [values[name] for name in sorted(values, key=order.__getitem__)]

    def _tokens(self, tensor: Tensor) -> dict[str, Any]:
        if self._tokenizer is None:
            raise _refused(f"input {tensor.name!r} is texts, and there is no tokenizer for them: {NUMBERS}")
        made = self._tokenizer(texts(tensor).ravel().tolist(), return_tensors="pt", padding=True, truncation=True)
        return {name: value.to(self._device) for name, value in made.items() if name in self._arguments}

    def _in(self, tensor: Tensor) -> Any:
        if tensor.datatype == "BYTES":
            raise _refused(f"input {tensor.name!r} is of BYTES, which isn't numbers")
        found = tensor.as_torch()
        if tensor.parameters.get(GUESSED) and self._dtype is not None and found.dtype != self._dtype:
            whole = not found.is_floating_point()
            found = found if whole and (self._takes_whole or tensor.datatype == "BOOL") else found.to(self._dtype)
        return found.to(self._device)


def _refused(text: str) -> PredictionException:
    return PredictionException(text, 400)


def _named(found: Any) -> Iterator[Tensor]:
    """The tensors of a result by name: a mapping's keys, a named tuple's fields."""
    if hasattr(found, "detach"):
        yield _sent(OUTPUT.format(0), found)
        return
    if isinstance(found, Mapping) or hasattr(found, "_asdict"):
        named = dict(found if isinstance(found, Mapping) else found._asdict())
        yield from (_sent(name, value) for name, value in named.items() if hasattr(value, "detach"))
        return
    values = found if isinstance(found, (tuple, list)) else [found]
    yield from (_sent(OUTPUT.format(index), value) for index, value in enumerate(values))


def _sent(name: str, value: Any) -> Tensor:
    try:
        return Tensor.of(name, value)
    except BadTensor as error:
        raise TritonModelException(f"the model's output {name!r} can't be sent: {error}") from None
