"""From expressions to lines of Triton, in float32."""

from __future__ import annotations

from collections.abc import Mapping

from tensorformer.gates.by_exp import by_exp
from tensorformer.gates.expr import Expr
from tensorformer.gates.printing import Printer, guarded, numeric, shared

# Triton's maximum, minimum and clamp drop NaN unless told not to.
_NAN = "propagate_nan=tl.PropagateNan.ALL"
_TOP = "3.4028234663852886e+38"
_FLOOR = "1.8807909613156600e-37"
# fmt: off
_TRITON = Printer({
    "square": "({0}*{0})", "sigmoid": "tl.sigmoid({0})", "exp": "tl.exp({0})", "Abs": "tl.abs({0})",
    "log": "tl.log({0})", "sqrt": "tl.sqrt({0})",
    "hump": "({0}*(1.0 - {0}))", "dome": "(1.0 - {0}*{0})",
    "gauss": "(0.3989422804014327*tl.exp(-0.5*({0}*{0})))",
    "relu": f"tl.maximum({{0}}, 0.0, {_NAN})", "cap": f"tl.minimum({{0}}, {{1}}, {_NAN})",
    "clip": f"tl.minimum(tl.maximum({{0}}, {{1}}, {_NAN}), {{2}}, {_NAN})",
    "above": "tl.where({0} > {1}, 1.0, 0.0)", "within": "tl.where(({0} >= {1}) & ({0} <= {2}), 1.0, 0.0)",
    "select": "tl.where({0} < {1}, {2}, {3})",
    "positive": f"tl.minimum(tl.maximum({{0}}, {_FLOOR}, {_NAN}), {_TOP}, {_NAN})",
    "finite": f"tl.minimum(tl.maximum({{0}}, -{_TOP}, {_NAN}), {_TOP}, {_NAN})",
    "floored": f"tl.maximum({{0}}, -{_TOP}, {_NAN})",
}, "Triton", "triton_source")
# fmt: on


def triton_lines(outputs: Mapping[str, Expr], temporary: str) -> list[str]:
    """Return the lines that assign each output, common parts computed once.

    Args:
        outputs: the name of a variable to each expression; float32 values under the expressions' own symbols.
        temporary: the prefix of the names of intermediate values.
    """
    temporaries, results = shared([numeric(by_exp(guarded(e))) for e in outputs.values()], temporary)
    assigned = [*temporaries, *zip(outputs, results, strict=True)]
    return [f"{name} = {_TRITON(e)}" for name, e in assigned]
