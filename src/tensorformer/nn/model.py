"""The decoder."""

from __future__ import annotations

from typing import cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.shapes import blocks
from tensorformer.nn.block import Block
from tensorformer.nn.init import initialise
from tensorformer.nn.norm import make_norm
from tensorformer.nn.state import State


class TensorTransformer(nn.Module):
    """A pre-norm decoder whose every block has the mixer and the feed-forward part that the config's pattern names.

    Args:
        config: the ``[model]`` table of a recipe.
        seed: of the initial weights; the same seed gives matrices of the same shape the same values.
    """

    def __init__(self, config: schema.Model, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(
            Block(config, config.mixers[mixer], config.ffns[ffn]) for mixer, ffn in blocks(config)
        )
        self.norm = make_norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        initialise(self, seed)

    def initial_state(self, batch: int) -> list[State]:
        """Return what decoding starts from, a state a block."""
        return [cast(Block, block).mixer.initial_state(batch) for block in self.layers]

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t vocab"]:
        """Return the logits of the token after each position."""
        x = self.embed(tokens)
        for block in self.layers:
            x, _ = block(x)
        return self.head(self.norm(x))

    def decode(self, tokens: Int[Tensor, "b t"], state: list[State]) -> tuple[Float[Tensor, "b vocab"], list[State]]:
        """Return the logits after the last of ``tokens``, and the state to go on from; ``state`` stays as it is."""
        x, after = self.embed(tokens), []
        for block, before in zip(self.layers, state, strict=True):
            x, new = block(x, before)
            after.append(new)
        return self.head(self.norm(x[:, -1])), after
