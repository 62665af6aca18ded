"""Programs of torch.export in a .pt2, and packages of AOTInductor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ts.compat.triton_backend.edges import Fields
from ts.compat.triton_backend.messages import TritonModelException
from ts.compat.triton_backend.torchscript import positions
from ts.protocol.datatypes import OF_ARRAY_TYPE
from ts.runtime.handlers import HandlerNotUsable
from ts.tensors.types import Tensor


def opened(file: Path, config: Fields, gpu_id: int | None) -> Exported:
    """Opens the package. Raises HandlerNotUsable if neither it nor the configuration declares its tensors."""
    import torch

    from ts.torch_handler.model_files import is_compiled_package, load_exported

    device = torch.device("cpu" if gpu_id is None else f"cuda:{gpu_id}")
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
