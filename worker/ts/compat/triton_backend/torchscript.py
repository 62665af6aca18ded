"""Backend `pytorch`: a TorchScript module in model.pt."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ts.compat.triton_backend.edges import Fields
from ts.compat.triton_backend.messages import TritonModelException, bytes_of, of_config, texts
from ts.runtime.handlers import HandlerNotUsable
from ts.tensors.types import Tensor

_INDEXED = re.compile(r".+__([0-9]+)")


def opened(file: Path, config: Fields, gpu_id: int | None) -> TorchScript:
    """Opens the module. Raises HandlerNotUsable if the configuration doesn't declare its tensors, or fit it."""
    for kind in ("input", "output"):
        if not config.get(kind):
            raise HandlerNotUsable(f"backend pytorch needs each {kind} in config.pbtxt: TorchScript doesn't say them")
    import torch

    device = torch.device("cpu" if gpu_id is None else f"cuda:{gpu_id}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(file), map_location=device)
    return TorchScript(module.eval(), config, device)


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
