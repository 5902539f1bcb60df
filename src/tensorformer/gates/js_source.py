"""From an expression to a JavaScript function of doubles, and the functions that such functions call."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from tensorformer.gates.expr import Expr
from tensorformer.gates.printing import Printer, guarded, numeric, shared

# Their names begin with $, which no parameter's can.
# fmt: off
_JS = Printer({
    "square": "$square({0})", "exp": "Math.exp({0})", "expm1": "Math.expm1({0})", "log": "Math.log({0})",
    "sqrt": "Math.sqrt({0})", "softplus": "$softplus({0})", "sigmoid": "$sigmoid({0})", "hump": "$hump({0})",
    "tanh": "Math.tanh({0})", "dome": "$dome({0})", "Phi": "$Phi({0})", "gauss": "$gauss({0})",
    "relu": "Math.max({0}, 0)", "cap": "Math.min({0}, {1})", "clip": "Math.min(Math.max({0}, {1}), {2})",
    "above": "$above({0}, {1})", "within": "$within({0}, {1}, {2})", "select": "({0} < {1} ? {2} : {3})",
    "positive": "Math.min(Math.max({0}, $FLOOR), Number.MAX_VALUE)",
    "finite": "Math.min(Math.max({0}, -Number.MAX_VALUE), Number.MAX_VALUE)",
    "floored": "Math.max({0}, -Number.MAX_VALUE)",
}, "JavaScript", "js_source")
# fmt: on

# $decay(a) is e^(−a²) with a split in two, since rounding a² would cost a²/2 ULP. $erfc: below 1.5 one less the series
# e^(−a²)·Σ (2a²)ⁿ a/(2n + 1)!!, whose terms are all positive; above it the continued fraction, from its 80th term.
JS_HELPERS = """\
const $FLOOR = 16 * 2.2250738585072014e-308;
const $square = (z) => z * z;
const $hump = (s) => s * (1 - s);
const $dome = (t) => 1 - t * t;
const $softplus = (z) => Math.max(z, 0) + Math.log1p(Math.exp(-Math.abs(z)));
const $above = (a, b) => (a > b ? 1 : a <= b ? 0 : NaN);
const $within = (z, low, high) => (z >= low && z <= high ? 1 : z !== z ? NaN : 0);
const $sigmoid = (z) => {
  if (z >= 0) return 1 / (1 + Math.exp(-z));
  const e = Math.exp(z);
  return e / (1 + e);
};
const $decay = (a) => {
  const top = Math.fround(a);
  return a < 40 ? Math.exp(-top * top) * Math.exp((top - a) * (top + a)) : a >= 40 ? 0 : NaN;
};
const $erfc = (z) => {
  const a = Math.abs(z), e = $decay(a);
  let tail = 0;
  if (a < 1.5) {
    let term = a, sum = a;
    for (let n = 1; term > 1e-17 * sum; n++) sum += term *= (2 * a * a) / (2 * n + 1);
    tail = 1 - 1.1283791670955126 * e * sum;
  } else {
    let below = a;
    for (let n = 80; n > 0; n--) below = a + (0.5 * n) / below;
    tail = (0.5641895835477563 * e) / below;
  }
  return z < 0 ? 2 - tail : tail;
};
const $Phi = (z) => 0.5 * $erfc(-0.7071067811865476 * z);
const $gauss = (z) => 0.3989422804014327 * $decay(0.7071067811865476 * Math.abs(z));
"""


def js_function(expr: Expr, names: Sequence[str]) -> str:
    """Return the source of a JavaScript function that computes ``expr`` in doubles.

    Args:
        expr: an expression in primitives.
        names: its variables, in the order of the function's arguments.

    Returns:
        An arrow function that is good in the scope of ``JS_HELPERS``. Its arguments are ``a0``, ``a1``, …, so that no
        parameter's name, such as ``new``, can matter.

    Raises:
        GateError: the expression uses a function that has no JavaScript form.
    """
    arguments = sympy.symbols(f"a:{len(names)}", real=True, seq=True)
    places = dict(zip((sympy.Symbol(n, real=True) for n in names), arguments, strict=True))
    temporaries, (result,) = shared([guarded(numeric(expr)).xreplace(places)], "t")
    body = "".join(f"const {t} = {_JS(e)}; " for t, e in temporaries)
    return f"({', '.join(map(str, arguments))}) => {{ {body}return {_JS(result)}; }}"
