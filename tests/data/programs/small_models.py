"""Writes small language models with random weights into folders of FOLDER: `llama` (text), `t5` (text from text), and
`reranker` (scores of pairs). Prints, as JSON, what `generate` of transformers makes of PROMPT with each, greedily.

Usage: python small_models.py FOLDER PROMPT TOKENS; needs torch and transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools <tool_call>{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD]", "[CLS]", "[SEP]"]
#: All of ASCII that is printed: a token is never a part of a character.
TEXTS = [Path(__file__).read_text(), "".join(map(chr, range(32, 127)))]


def tokenizer(*, pairs: bool = False) -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL)
    made.train_from_iterator(TEXTS, trainer)
    if pairs:
        ends = [(word, SPECIAL.index(word)) for word in ("[CLS]", "[SEP]")]
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", pad_token="[PAD]", chat_template=TEMPLATE
    )


def main() -> None:
    folder, prompt, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.manual_seed(3)
    tokens = tokenizer()
    size = len(tokens)
    ends = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": SPECIAL.index("[PAD]")}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=size,
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=512,
            initializer_range=0.6,
            **ends,
        )
    )
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=size,
            d_model=64,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=3,
            initializer_factor=4.0,
            **ends,
        )
    )
    reranker = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=size,
            num_labels=1,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            initializer_range=1.0,
        )
    )
    found = {}
    for name, model in (("llama", llama), ("t5", t5)):
        model.eval().save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
        given = tokens([prompt], return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            made = model.generate(**given, max_new_tokens=count, do_sample=False)[0]
        new = made[given["input_ids"].shape[1] :] if name == "llama" else made[1:]
        found[name] = tokens.decode(new, skip_special_tokens=True)
    reranker.save_pretrained(folder / "reranker")
    tokenizer(pairs=True).save_pretrained(folder / "reranker")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
