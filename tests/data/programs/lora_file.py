"""Writes an adapter of random weights for the GGUF model MODEL to FILE. Needs the package gguf.

Usage: python lora_file.py MODEL FILE
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

RANK = 4
writer = gguf.GGUFWriter(sys.argv[2], "llama")
writer.add_type("adapter")
writer.add_string("adapter.type", "lora")
writer.add_float32("adapter.lora.alpha", 8.0)
numbers = np.random.default_rng(0)
for tensor in gguf.GGUFReader(sys.argv[1]).tensors:
    if tensor.name.endswith(("attn_q.weight", "ffn_down.weight")):
        taken, given = map(int, tensor.shape)
        for end, shape in (("lora_a", (RANK, taken)), ("lora_b", (given, RANK))):
            writer.add_tensor(f"{tensor.name}.{end}", numbers.normal(0, 0.05, shape).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
