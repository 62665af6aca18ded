"""Writes small models of Bert, the same ones with every release of torch and transformers, into folders of FOLDER:
`classes`, `several` (of several labels each may fit), `tags`, `masks`, `questions`, `pairs` (one label). Prints, as
JSON, what pipelines of transformers make of the texts, by folder; for `questions`, of which transformers has no
pipeline any more, the best of all spans, one by one.

Usage: python task_models.py FOLDER QUESTION CONTEXT TEXT...; needs torch and transformers.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
#: What the tokenizer knows besides the characters of ASCII.
WORDS = (
    *("good", "film", "was", "person", "who", "went", "to", "the", "far", "by"),
    *("train", "and", "stayed", "at", "home", "with", "from", "Ann", "##om", "##ith"),
)
TAGS = ["B-PER", "I-PER", "O", "B-LOC", "I-LOC"]
LENGTH, PART, COMMON, ANSWER = 512, 384, 128, 15


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    characters = [chr(number) for number in range(33, 127)]
    words = dict.fromkeys([*SPECIAL, *characters, *(f"##{one}" for one in characters), *WORDS])
    vocabulary = {word: at for at, word in enumerate(words)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    ends = [(word, SPECIAL.index(word)) for word in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = {f"{word.strip('[]').lower()}_token": word for word in SPECIAL}
    arguments = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=LENGTH, model_input_names=arguments, **names
    )


def model(tokens: Any, kind: str, labels: list[str], **more: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        id2label=dict(enumerate(labels)),
        **more,
    )
    made = getattr(transformers, f"BertFor{kind}")(config).eval()
    chance = np.random.RandomState(5)  # whose numbers are the same in every release
    with torch.no_grad():
        for one in made.parameters():
            if one.dim() > 1:
                one.copy_(torch.from_numpy(chance.normal(0, 0.5, one.shape)))
    return made


def best_span(tokens: Any, asking: Any, question: str, context: str) -> dict[str, Any]:
    asked = tokens(question, add_special_tokens=False)["input_ids"]
    given = tokens(context, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = given["input_ids"], given["offset_mapping"]
    room = PART - len(asked) - 3
    best: tuple[float, int, int] = (-1.0, 0, 0)
    for begin in range(0, max(1, len(ids) - COMMON), room - COMMON):
        part = ids[begin : begin + room]
        row = [tokens.cls_token_id, *asked, tokens.sep_token_id, *part, tokens.sep_token_id]
        types = [0] * (len(asked) + 2) + [1] * (len(part) + 1)
        with torch.inference_mode():
            found = asking(input_ids=torch.tensor([row]), token_type_ids=torch.tensor([types]))
        first = len(asked) + 2
        counted = [0, *range(first, first + len(part))]
        starts, ends = (one[0][counted].softmax(0).tolist()[1:] for one in (found.start_logits, found.end_logits))
        for start in range(len(part)):
            for end in range(start, min(start + ANSWER, len(part))):
                best = max(best, (starts[start] * ends[end], -(begin + start), -(begin + end)))
    score, start, end = best[0], places[-best[1]][0], places[-best[2]][1]
    words = [one.span() for one in re.finditer(r"\w+|[^\w\s]+", context)]
    start = next(word[0] for word in words if word[0] <= start < word[1])
    end = next(word[1] for word in words if word[0] < end <= word[1])
    return {"score": score, "start": start, "end": end, "answer": context[start:end]}


def plain(value: Any) -> Any:
    return value.item()


def main() -> None:
    folder, question, context, texts = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
    tokens = tokenizer()
    made = {
        "classes": model(tokens, "SequenceClassification", ["bad", "fair", "good"]),
        "several": model(
            tokens, "SequenceClassification", ["red", "green", "blue"], problem_type="multi_label_classification"
        ),
        "pairs": model(tokens, "SequenceClassification", ["fits"]),
        "tags": model(tokens, "TokenClassification", TAGS),
        "masks": model(tokens, "MaskedLM", ["a", "b"]),
        "questions": model(tokens, "QuestionAnswering", ["a", "b"]),
    }
    for name, one in made.items():
        one.save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    masked = [f"{text} [MASK] ." for text in texts]

    def pipeline(task: str, name: str) -> Any:
        return transformers.pipeline(task, model=made[name], tokenizer=tokens, device="cpu")

    classes, tags = pipeline("text-classification", "classes"), pipeline("token-classification", "tags")
    masks = pipeline("fill-mask", "masks")
    with torch.inference_mode():
        logits = {
            "classes": [made["classes"](**tokens(text, return_tensors="pt")).logits[0].tolist() for text in texts],
            "tags": [made["tags"](**tokens(text, return_tensors="pt")).logits[0].tolist() for text in texts],
            "pairs": [made["pairs"](**tokens(question, text, return_tensors="pt")).logits[0].item() for text in texts],
        }
    found = {
        "classes": [classes(text) for text in texts],
        "all": [classes(text, top_k=None) for text in texts],
        "pair": classes({"text": question, "text_pair": context}),
        "several": pipeline("text-classification", "several")(texts, top_k=3),
        "tags": [tags(text) for text in texts],
        "groups": [tags(text, aggregation_strategy="simple", ignore_labels=[]) for text in texts],
        "masks": [masks(text) for text in masked],
        "targets": masks(masked[0], targets=["the", "a"], top_k=1),
        "questions": [best_span(tokens, made["questions"], question, text) for text in (context, context * 40)],
        "logits": logits,
    }
    print(json.dumps(found, default=plain))


if __name__ == "__main__":
    main()
