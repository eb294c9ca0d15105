"""Trains a small model of transformers on random tokens: llama, qwen, t5, gpt2, or llama with recomputation."""

import sys

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 512
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DECODER)),
    "qwen": lambda: Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=32, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=VOCABULARY)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=128,
            d_ff=256,
            num_layers=2,
            num_heads=4,
            d_kv=32,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ),
}
device = "cuda" if torch.cuda.is_available() else "cpu"
model = MODELS[sys.argv[1]]().to(device).train()
if "--recompute" in sys.argv:
    model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for step in range(5):
    tokens = torch.randint(0, VOCABULARY, (4, 64)).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(step, loss.item())
