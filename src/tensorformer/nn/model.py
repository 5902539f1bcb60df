"""The decoder."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorformer.config import schema
from tensorformer.config.shapes import blocks
from tensorformer.errors import ShapeError
from tensorformer.nn.block import Block
from tensorformer.nn.init import initialise
from tensorformer.nn.moe import MoE
from tensorformer.nn.norm import make_norm
from tensorformer.nn.router import Routing
from tensorformer.nn.state import State, check_blocks


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

    def initial_state(self, batch: int) -> State:
        """Return what decoding starts from, a state a block."""
        return tuple(cast(Block, block).mixer.initial_state(batch) for block in self.layers)

    def mixtures(self) -> list[MoE]:
        """Return its mixtures of experts, in the order in which tokens meet them."""
        return [block.ffn for block in cast(list[Block], list(self.layers)) if isinstance(block.ffn, MoE)]

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        segments: Int[Tensor, "b t"] | None = None,
        routings: list[Routing] | None = None,
    ) -> Float[Tensor, "b t vocab"]:
        """Return the logits of the token after each position.

        Args:
            tokens: the input.
            segments: −1 is padding, whatever token stands there; a new number starts a new document, which sees
                nothing of the one before it. None: each row is one document.
            routings: a list to which every one of ``mixtures`` appends how it routed the tokens.
        """
        x = self.embed(tokens)
        for block in self.layers:
            x, _ = block(x, None, segments, routings)
        return self.head(self.norm(x))

    def decode(
        self, tokens: Int[Tensor, "b t"], state: State, segments: Int[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b vocab"], State]:
        """Return the logits after the last token of each row, and the state to go on from; ``state`` stays as it is.

        Args:
            tokens: the next of each row.
            state: what came before, as ``initial_state`` or this method returned it.
            segments: as in ``forward``. A row of nothing but padding keeps its state; its logits mean nothing.

        Raises:
            ShapeError: it is the state of another model or of other rows, or there is no token.
        """
        check_blocks(state, len(self.layers))
        if tokens.shape[1] == 0:
            raise ShapeError("there is no token to decode; give at least one column")
        x, after = self.embed(tokens), []
        for block, before in zip(self.layers, state, strict=True):
            x, new = block(x, before, segments)
            after.append(new)
        if segments is None:
            x = x[:, -1]
        else:
            steps = torch.arange(x.shape[1], device=x.device)
            last = torch.where(segments >= 0, steps, 0).amax(1)
            x = x[torch.arange(len(x), device=x.device), last]
        return self.head(self.norm(x)), tuple(after)
