"""Activation, product and cast to a narrow format in one pass, as inference engines fuse them; and back."""

from tensorformer.ops.act_quant.api import act_quant, resolve
from tensorformer.ops.act_quant.formats import FORMATS, Format
from tensorformer.ops.act_quant.quantised import Quantised, dequantise, nvfp4_tensor_scale, quantise

__all__ = ["FORMATS", "Format", "Quantised", "act_quant", "dequantise", "nvfp4_tensor_scale", "quantise", "resolve"]
