"""Adapters (LoRA) in a causal model of the package transformers, different ones in one batch. Needs peft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ts.protocol.tasks import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ts.utils.util import PredictionException

#: The name that peft has for the model without an adapter.
BASE = "__base__"
#: The settings of an adapter that change its own weights alone. Others also change the model's, for every text.
_OWN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
        *("lora_dropout", "peft_version", "r", "rank_pattern", "revision", "target_modules", "task_type"),
        "use_rslora",
    }
)
#: Beginnings of an adapter's training that leave the model's own weights as they are.
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


class Adapters:
    """The adapters of a model, each by a key of its own. All methods belong to the thread that computes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._peft: Any = None
        self._layers: list[Any] = []
        self._hooks: list[Any] = []
        #: The adapter of each row of the next computation: a key, or BASE.
        self.rows: Sequence[str] = ()

    def load(self, key: str, folder: str) -> None:
        """Raises PredictionException (400) for an adapter that isn't for this model, or can't be beside others."""
        import peft  # type: ignore[import-not-found,unused-ignore]

        config = _config(peft, Path(folder))
        try:
            self._inject(peft, key, config)
            found = self._peft.load_adapter(folder, key, torch_device=str(self._model.device))
            if keys := [*found.unexpected_keys, *(one for one in found.missing_keys if f".{key}." in one)]:
                raise ValueError(f"the weights of {keys[0]} are not those of the model or of {ADAPTER_CONFIG}")
            self._try(key)
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
            self.remove(key)
            text = " ".join(str(error).split())[:400]
            raise PredictionException(f"The adapter in {folder} does not fit the model: {text}", 400) from error

    def remove(self, key: str) -> None:
        if self._peft is not None and key in self._peft.peft_config:
            self._peft.delete_adapter(key)
        for layer in self._layers:  # those of an adapter whose injection failed half-way
            layer.delete_adapter(key)

    def _inject(self, peft: Any, key: str, config: Any) -> None:
        """Puts the adapter's layers into the model; their weights are 0 so far."""
        try:
            if self._peft is None:
                self._peft = peft.PeftModel(self._model, config, adapter_name=key)
            else:
                self._peft.add_adapter(key, config)
        finally:
            from peft.tuners.lora import LoraLayer  # type: ignore[import-not-found,unused-ignore]

            for hook in self._hooks:
                hook.remove()
            self._layers = [one for one in self._model.modules() if isinstance(one, LoraLayer)]
            self._hooks = [one.register_forward_pre_hook(self._named, with_kwargs=True) for one in self._layers]
        self._model.eval()

    def _named(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Tells a layer the adapter of each row. peft's own way to do so costs a hook for each layer in each step."""
        return given, named | {"adapter_names": list(self.rows)}

    def _try(self, key: str) -> None:
        """Computes a row with the adapter beside one without it: some layers can't do that."""
        self.rows = (key, BASE)
        with torch.inference_mode():
            self._model(input_ids=torch.zeros((2, 2), dtype=torch.long, device=self._model.device))


def _config(peft: Any, folder: Path) -> Any:
    """An adapter's settings. Raises PredictionException (400)."""
    import safetensors  # type: ignore[import-not-found,unused-ignore]

    try:
        given = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind = given["peft_type"]
        config = peft.PeftConfig.from_pretrained(str(folder))
        with safetensors.safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            others = [key for key in file.keys() if "lora_" not in key]  # noqa: SIM118  # it is no mapping
    except (OSError, ValueError, TypeError, LookupError, safetensors.SafetensorError) as error:
        raise PredictionException(f"{folder} is not the folder of an adapter of peft: {error}", 400) from error
    usual = peft.LoraConfig().to_dict()
    changed = [] if kind != "LORA" else [name for name, value in config.to_dict().items() if value != usual.get(name)]
    wrong = {"peft_type": kind} if kind != "LORA" else {name: given.get(name) for name in set(changed) - _OWN}
    if config.peft_type == "LORA" and config.init_lora_weights not in _BEGINNINGS:
        wrong["init_lora_weights"] = config.init_lora_weights
    if others and not wrong:
        wrong = {ADAPTER_WEIGHTS: others[0]}
    if wrong:
        name = min(wrong)
        raise PredictionException(
            f"The adapter in {folder} has {name}: {json.dumps(wrong[name])[:80]}. This engine computes plain LoRA, "
            "which leaves the model's own weights as they are; the engine vllm may take others",
            400,
        )
    config.init_lora_weights = True
    return config
