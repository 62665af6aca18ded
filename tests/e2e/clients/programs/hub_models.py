"""Writes small checkpoints as they lie on a hub, with random weights, into folders of FOLDER: `whole`, `parts` (several
files), `half` (bfloat16), and `other`, whose config.json is that of another model. Prints, as JSON, the logits of the
first three for the texts that follow.

Usage: python hub_models.py FOLDER TEXT...; needs torch and transformers.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
WORDS = [*SPECIAL.values(), "a", "good", "bad", "film"]
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(word, WORDS.index(word)) for word in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def main() -> None:
    folder, texts = Path(sys.argv[1]), sys.argv[2:]
    tokens = tokenizer()
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=len(WORDS), num_labels=2, initializer_range=1.0, **SMALL)
    model = transformers.BertForSequenceClassification(config).eval()
    found = {}
    for name, kind, size in (("whole", "float32", "1GB"), ("parts", "float32", "1KB"), ("half", "bfloat16", "1GB")):
        model = model.to(getattr(torch, kind))
        model.save_pretrained(folder / name, max_shard_size=size)
        tokens.save_pretrained(folder / name)
        with torch.inference_mode():
            found[name] = model(**tokens(texts, return_tensors="pt", padding=True)).logits.float().tolist()
    shutil.copytree(folder / "whole", folder / "other")
    transformers.DistilBertConfig(architectures=["DistilBertModel"]).save_pretrained(folder / "other")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
