"""Writes adapters (LoRA) of the model in MODEL, with random weights, into folders of FOLDER. Prints, as JSON by name,
what `generate` of peft makes of PROMPT with each, greedily.

Usage: python small_adapters.py MODEL FOLDER PROMPT TOKENS; needs torch, transformers and peft.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch
import transformers

#: The settings of each: other ranks and layers.
ADAPTERS = {
    "formal": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
    "short": {"r": 8, "target_modules": ["v_proj", "o_proj", "lm_head"], "use_rslora": True},
    "with_weights": {"r": 2, "target_modules": ["lm_head"]},
    "weighted": {"r": 2, "target_modules": ["q_proj"], "use_dora": True},
}


def main() -> None:
    model, folder, prompt, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    tokens = transformers.AutoTokenizer.from_pretrained(model)
    given = tokens([prompt], return_tensors="pt", return_token_type_ids=False)
    found = {}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        whole = transformers.AutoModelForCausalLM.from_pretrained(model)
        adapted = peft.get_peft_model(whole, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        torch.manual_seed(seed)
        for key, weights in adapted.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(weights, std=0.3)
        adapted.save_pretrained(folder / name, save_embedding_layers=name == "with_weights")
        with torch.inference_mode():
            made = adapted.generate(**given, max_new_tokens=count, do_sample=False)[0]
        found[name] = tokens.decode(made[given["input_ids"].shape[1] :], skip_special_tokens=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
