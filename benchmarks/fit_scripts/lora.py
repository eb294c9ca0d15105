"""Trains the low-rank adapters (peft) of a small Llama of transformers."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).to(device)
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
for _ in range(5):
    tokens = torch.randint(0, VOCABULARY, (4, 64)).to(device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
