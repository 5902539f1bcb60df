"""Small recipes that tests build on."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"

TRAIN = """[train]
tokens = 2560
context = 16
batch_size = 8
optimizer = { kind = "adamw", lr = 1e-2 }
schedule = { kind = "cosine", warmup_steps = 2 }
evaluate_every = 5
evaluate_tokens = 512
final_tokens = 1024
checkpoint_every = 4
"""

TINY = (
    """
name = "tiny"

[data]
source = ["corpus/*.txt"]
validation = 0.2
tuning = 0.2

[model]
d_model = 16
n_layers = 2
layers = [{ mixer = "softmax", ffn = "swiglu" }]
[model.mixers.softmax]
kind = "softmax_attention"
n_heads = 2
[model.mixers.bilinear]
kind = "linear_attention"
preset = "bilinear"
n_heads = 2
[model.ffns.swiglu]
kind = "feed_forward"
gate = "swiglu"
d_ff = 40
[model.ffns.bilinear]
kind = "feed_forward"
gate = "bilinear"
d_ff = 40

"""
    + TRAIN
    + """
[compare]
baseline = "swiglu"
seeds = [0, 1]
delta = 0.05
tolerance = 0.02

[variants.swiglu]
[variants.bilinear]
description = "no activation, no softmax"
model.layers = [{ mixer = "bilinear", ffn = "bilinear" }]
"""
)


def write_corpus(folder: Path, documents: int = 40) -> None:
    """Write small documents of text that can be learnt a little."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        lines = [f"line {j} of document {i}: {j} + {i} = {i + j}." for j in range(30)]
        (corpus / f"{i:03}.txt").write_text("\n".join(lines), encoding="utf-8")


def write_tiny(folder: Path, text: str = TINY) -> Path:
    """Write the corpus and a recipe into ``folder`` and return the recipe's path."""
    write_corpus(folder)
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path
