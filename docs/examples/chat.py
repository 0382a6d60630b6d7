"""Chat with a cache of 2,048 tokens per layer, up to the length that the model was trained on.

    python docs/examples/chat.py --model meta-llama/Meta-Llama-3-8B-Instruct
    python docs/examples/chat.py --model meta-llama/Meta-Llama-3-8B-Instruct --say "Who was Ada Lovelace?" "Her father?"

One cache serves the whole conversation. The tokens of a turn are a prompt: they are added to the cache, which is then
compressed to its budget. So memory does not grow beyond 2,048 tokens, however long the conversation is. `h2o` keeps the
tokens that received the most attention, and the newest ones; `streaming` would keep the first four and the newest.

Positions are not compressed: tokens keep their original positions, which continue to increase. End a conversation
before the model's `max_position_embeddings`. Beyond it, a KVPolicyWarning says that answers may get worse.

Without `--model`, the embedded model answers. It does not support roles, only records and questions about them, and its
budget here is 256 tokens.

Prints (embedded model, CPU): 5 turns, 1,085 tokens seen, 256 kept in each layer: 2,162,888 bytes, 0.24 of the full
cache
"""

import argparse
from random import Random
from typing import Any

import torch

import kvpolicy
from kvpolicy_eval.data import prompts


def load(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if name == "tiny":
        return kvpolicy.tiny()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")
    return model.eval(), AutoTokenizer.from_pretrained(name)


def newest(tokenizer: Any, chat: list[dict[str, str]]) -> str:
    """The newest turn in the format of the model; earlier turns are in the cache already."""
    if not tokenizer.chat_template:
        return chat[-1]["content"]
    before = tokenizer.apply_chat_template(chat[:-1], tokenize=False) if len(chat) > 1 else ""
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)[len(before) :]


def main() -> None:
    """Chat, and print the size of the cache after each turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--budget", type=int, help="tokens per layer, on average")
    parser.add_argument("--say", nargs="*", help="your turns")
    args = parser.parse_args()
    tiny = args.model == "tiny"
    turns = args.say or ["Tell me about the moon.", "How far away is it?", "And how long does light take from there?"]
    if tiny and not args.say:
        turns = [prompts.recall(Random(seed), records=30)[0] for seed in range(5)]  # 30 records and a question each
    model, tokenizer = load(args.model)
    policy = kvpolicy.Policy(selector=kvpolicy.H2O(), budget=args.budget or (256 if tiny else 2048))
    with kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        chat: list[dict[str, str]] = []
        tokens = torch.empty(1, 0, dtype=torch.int64, device=model.device)
        for turn in turns:
            chat.append({"role": "user", "content": turn})
            text = newest(tokenizer, chat)
            # A chat template contains the special tokens. Without one, they are added to the first turn only.
            is_first = len(chat) == 1
            add_special_tokens = is_first and not tokenizer.chat_template
            new = tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt")
            tokens = torch.cat([tokens, new.input_ids.to(model.device)], 1)
            length = tokens.shape[1]
            tokens = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                cache=cache,
                max_new_tokens=4 if tiny else 256,
                do_sample=False,
            )
            answer = tokenizer.decode(tokens[0, length:], skip_special_tokens=True)
            chat.append({"role": "assistant", "content": answer})
            print(f"{turn[-60:]}\n> {answer}\n  [{length:,} tokens so far, {cache.nbytes:,} bytes]")
        layer = cache.report().layers[0]
        print(
            f"{len(turns)} turns, {layer.seen[0]:,} tokens seen, {layer.kept[0]:,} kept in each layer: "
            f"{cache.nbytes:,} bytes, {cache.nbytes / cache.full_nbytes:.2f} of the full cache"
        )


if __name__ == "__main__":
    main()
