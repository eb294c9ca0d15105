"""Tokens and positions to vectors. Letters: B batch, T positions, H hidden."""

from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape


class Embedding(nn.Module):
    """hidden_BTH = dropout(word vectors + position vectors); the latter only for learned_absolute positions."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.position_embeddings = None
        if shape.position_embedding == "learned_absolute":
            self.position_embeddings = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        hidden_BTH = self.word_embeddings(tokens_BT)
        if self.position_embeddings is not None:
            hidden_BTH = hidden_BTH + self.position_embeddings(positions_BT)
        return self.dropout(hidden_BTH)
