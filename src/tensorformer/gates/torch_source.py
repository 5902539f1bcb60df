"""From an expression to the source of a torch function."""

from __future__ import annotations

from collections.abc import Sequence

from tensorformer.gates.expr import Expr, select, x
from tensorformer.gates.printing import Marker, Printer, guarded, numeric, shared

# `above` and `within` go through sign: torch's comparisons and `where` on CPU cost ten times as much.
# fmt: off
_TORCH = Printer({
    "square": "torch.square({0})", "sigmoid": "torch.sigmoid({0})", "tanh": "torch.tanh({0})", "exp": "torch.exp({0})",
    "expm1": "torch.expm1({0})", "log": "torch.log({0})", "sqrt": "torch.sqrt({0})",
    "softplus": "(torch.relu({0}) + torch.log1p(torch.exp(-torch.abs({0}))))",
    "hump": "({0}*(1.0 - {0}))", "dome": "(1.0 - {0}*{0})",
    "Phi": "(0.5*torch.erfc(-0.7071067811865476*{0}))", "gauss": "(0.3989422804014327*torch.exp(-0.5*({0}*{0})))",
    "relu": "torch.relu({0})", "cap": "torch.clamp({0}, max={1})", "clip": "torch.clamp({0}, {1}, {2})",
    "above": "torch.sign(torch.relu({0} - {1}))",
    "within": "(1.0 - torch.sign({0} - torch.clamp({0}, {1}, {2})).abs())",
    "select": "torch.where({0} < {1}, {2}, {3})", "typed": "({0} + zero)",
    "positive": "torch.clamp({0}, floor, top)",
    "finite": "torch.clamp({0}, -top, top)", "floored": "torch.clamp({0}, min=-top)",
}, "torch", "torch_source")
# fmt: on

_NAMED = {
    "top": "torch.finfo({0}.dtype).max",
    "floor": "16 * torch.finfo({0}.dtype).smallest_normal",
    "zero": "torch.zeros((), dtype={0}.dtype, device={0}.device)",
}


class typed(Marker):
    """A number in the dtype of the input: of two plain numbers ``torch.where`` makes its default dtype."""

    is_number = False  # pyright: ignore  # printed as it stands, never worked out


def _typed(a: Expr, b: Expr, p: Expr, q: Expr) -> Expr:
    return select(a, b, *(e if e.has(x) else typed(e) for e in (p, q)))


def torch_source(expr: Expr, names: Sequence[str]) -> str:
    """Return the source of ``value(*names)``, which computes ``expr`` on tensors of one floating dtype."""
    expr = guarded(numeric(expr)).replace(select, _typed)
    temporaries, (result,) = shared([expr], "t")
    body = [f"    {t} = {_TORCH(e)}" for t, e in temporaries] + [f"    return {_TORCH(result)}"]
    text = "\n".join(body)
    named = [f"    {n} = {e.format(names[0])}" for n, e in _NAMED.items() if n in text]
    return "\n".join([f"def value({', '.join(names)}):", *named, *body]) + "\n"
