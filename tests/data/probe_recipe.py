"""A small comparison on a probe."""

from tests.recipes import TRAIN

TINY_PROBE = (
    """
name = "tiny-probe"

[data.probe]
kind = "recall"
pairs = 3
keys = 8
values = 8

[model]
d_model = 16
n_layers = 2
vocab_size = 17
layers = [{ mixer = "softmax", ffn = "swiglu" }]
[model.mixers.softmax]
kind = "softmax_attention"
n_heads = 2
[model.mixers.linear]
kind = "linear_attention"
preset = "linear"
n_heads = 2
[model.ffns.swiglu]
kind = "feed_forward"
gate = "swiglu"
d_ff = 40

"""
    + TRAIN
    + """
[compare]
baseline = "softmax"
seeds = [0, 1]
delta = 0.05

[variants.softmax]
[variants.linear]
model.layers = [{ mixer = "linear", ffn = "swiglu" }]
"""
)

RECALL = 'kind = "recall"\npairs = 3\nkeys = 8\nvalues = 8'
INDUCTION = 'kind = "induction"\nshortest = 2\nlongest = 9\nsymbols = 16'
SELECTIVE_COPYING = 'kind = "selective_copying"\ncopied = 4\nsymbols = 8'
NEEDLE = 'kind = "needle"\nkeys = 2\nsymbols = 8'
EACH = {"recall": RECALL, "induction": INDUCTION, "selective_copying": SELECTIVE_COPYING, "needle": NEEDLE}


def tiny_probe(probe: str = RECALL) -> str:
    """Return the recipe with another probe in it."""
    return TINY_PROBE.replace(RECALL, probe)
