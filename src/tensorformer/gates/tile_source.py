"""A gate as torch operations on one tile, in place: its value, or its two gradients with their common parts once.

The temporaries are handed in, so that they stay in the cache from one tile to the next. ``torch_source.py`` writes the
same formulas as one expression on new tensors, which autograd and ``torch.compile`` can follow.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import sympy
import torch
from torch import Tensor

from tensorformer.errors import GateError
from tensorformer.gates import expr as ex
from tensorformer.gates.expr import Expr
from tensorformer.gates.gate import Gate
from tensorformer.gates.printing import guarded, is_inverse, numeric, shared


class Program(NamedTuple):
    """Lines of torch that fill the outputs of one tile.

    ``run(g, u, *outputs, *scratch, *parameters)``, with ``dh`` after ``u`` where gradients are wanted: all of one
    dtype, ``scratch`` of them temporaries of the tile's shape, and the parameters those that are tensors.
    """

    run: Callable[..., None]
    scratch: int
    source: str


class silu(ex.Primitive):
    """z·σ(z), which torch has in one pass, and its backward in another."""

    bounded = False
    pattern = r"\mathrm{{SiLU}}\left({0}\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return z * ex.sigmoid.definition(z)

    @staticmethod
    def slopes(z: Expr) -> tuple[Expr, ...]:
        return (silu_slope(z),)


class silu_slope(ex.Primitive):
    """The derivative of ``silu``."""

    pattern = r"\mathrm{{SiLU}}'\left({0}\right)"

    @staticmethod
    def definition(z: Expr) -> Expr:
        return sympy.diff(silu.definition(z), z)


# What is multiplied to make each output; φ, ψ and their slopes.
_PRODUCTS = {"h": ("phi", "psi"), "dg": ("dh", "psi", "phi'"), "du": ("dh", "phi", "psi'")}


def write(gate: Gate, dtype: torch.dtype, wanted: tuple[str, ...]) -> Program:
    """Return what computes ``wanted`` of a bound gate in ``dtype``.

    Args:
        gate: parameters that are numbers become part of the program, tensors its last arguments.
        dtype: of every tensor.
        wanted: ``("h",)`` for h = φ(g)·ψ(u), or some of ``("dg", "du")``: dh·∂h/∂g and dh·∂h/∂u.

    Raises:
        GateError: the formula uses a function that has no form here.
    """
    needed = list(dict.fromkeys(f for output in wanted for f in _PRODUCTS[output] if f != "dh"))
    temporaries, results = shared([_factor(gate, f) for f in needed], "t")
    factors = {"dh": ex.symbol("dh"), **dict(zip(needed, results, strict=True))}
    products = {output: [factors[f] for f in _PRODUCTS[output]] for output in wanted}
    names = [n for n, v in gate.parameters.items() if isinstance(v, Tensor)]
    writer = _Writer(dtype, names, dict(temporaries), [e for p in products.values() for e in p])
    for output, product in products.items():
        writer.product(product, output)
    inputs = ["g", "u"] if wanted == ("h",) else ["g", "u", "dh"]
    scratch = [f"w{i}" for i in range(writer.scratch)]
    head = f"def run({', '.join([*inputs, *wanted, *scratch, *names])}):"
    source = "\n    ".join([head, *_limits(dtype, writer.lines), *writer.lines]) + "\n"
    file = f"<tensorformer {gate!r} {', '.join(wanted)} {dtype}>"
    # Tracebacks and debuggers can then show the printed lines.
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten}
    exec(compile(source, file, "exec"), scope)
    return Program(scope["run"], len(scratch), source)


def _limits(dtype: torch.dtype, lines: Iterable[str]) -> list[str]:
    """Return the lines that set what the guards in ``lines`` use."""
    values = {"top": torch.finfo(dtype).max, "floor": 16 * torch.finfo(dtype).smallest_normal}
    text = "\n".join(lines)
    return [f"{n} = {v!r}" for n, v in values.items() if n in text]


def _factor(gate: Gate, name: str) -> Expr:
    """Return φ(g) or ψ(u), or its slope, with guards set and the numbers in their places."""
    scalar, variable = (gate.gate, ex.g) if name.startswith("phi") else (gate.value, ex.u)
    expr = scalar.expr.replace(lambda e: e.is_Mul, _with_silu)
    if name.endswith("'"):
        expr = ex.derivative(expr, "x")
    numbers = {ex.symbol(n): sympy.Rational(v) for n, v in scalar.parameters.items() if isinstance(v, float)}
    expr = expr.subs(numbers).replace(lambda e: isinstance(e, ex.Primitive) and e.is_number, lambda e: e.doit())
    return guarded(numeric(expr)).subs(ex.x, variable)


class _Operand(NamedTuple):
    """A value as text. ``kind``: a "number", a "parameter" (or made of them), "read" only, or "owned" scratch."""

    text: str
    kind: str


@final
class _Writer:
    """Writes expressions as lines that each fill a tensor, a shared part just before its first reader.

    Args:
        dtype: of all tensors.
        parameters: names of tensors that may be smaller than a tile.
        temporaries: the shared parts.
        roots: every expression that will be asked for, once for each time.
    """

    def __init__(
        self, dtype: torch.dtype, parameters: Iterable[str], temporaries: dict[Any, Expr], roots: Sequence[Expr]
    ) -> None:
        self.dtype = dtype
        self.parameters = frozenset(map(ex.symbol, parameters))
        self.temporaries = temporaries
        self.lines: list[str] = []
        self.scratch = 0
        self._free: list[str] = []
        self._made: dict[Any, _Operand] = {}
        self._reads: Counter[Any] = Counter(
            node for e in [*temporaries.values(), *roots] for node in sympy.preorder_traversal(e) if node.is_Symbol
        )

    def product(self, factors: Sequence[Expr], output: str) -> None:
        """Multiply from left to right into ``output``, each factor by itself: an infinite one keeps its distance."""
        factors = [a for f in factors if f != 1 for a in (f.args if f.is_Mul and f.has(silu_slope) else (f,))]
        if len(factors) == 1:
            self._line("{out}.copy_({0})", self(factors[0]), out=output)
            return
        value = self(factors[0])
        for i, factor in enumerate(factors[1:], 2):
            value = self._times(value, factor, output if i == len(factors) else None)

    def __call__(self, expr: Expr) -> _Operand:
        if expr.is_number:
            return _Operand(repr(float(expr)), "number")
        if expr.is_Symbol:
            return self._symbol(expr)
        if expr.is_Add:
            return self._sum(expr)
        if expr.is_Mul:
            return self._product(expr)
        if expr.is_Pow:
            return self._power(*expr.as_base_exp())
        name, values = type(expr).__name__, [self(a) for a in expr.args]
        if name in _CHAINS:
            for template in _CHAINS[name]:
                values = [self._line(template, *values)]
            return values[0]
        if name not in _FORMS:
            raise GateError(f"no tile form of {name!r} in {expr}: add it to gates/tile_source.py")
        return _FORMS[name](self, *values)

    def _symbol(self, symbol: Any) -> _Operand:
        if symbol in self.parameters:
            return _Operand(symbol.name, "parameter")
        if symbol not in self.temporaries:
            return _Operand(symbol.name, "read")
        if symbol not in self._made:
            self._made[symbol] = self(self.temporaries[symbol])
        self._reads[symbol] -= 1
        made = self._made[symbol]
        return made if self._reads[symbol] == 0 or made.kind != "owned" else _Operand(made.text, "read")

    def _line(self, template: str, *operands: _Operand, out: str | None = None) -> _Operand:
        """Write one operation over an operand that nobody reads again, or into new scratch, or into ``out``."""
        if all(o.kind in ("number", "parameter") for o in operands):
            # Small or a number itself: no place in a tile.
            return _Operand(template.replace(", out={out}", "").format(*(o.text for o in operands)), "parameter")
        owned = [o.text for o in operands if o.kind == "owned"]
        target = out or (owned[0] if owned else self._new())
        self.lines.append(template.format(*(o.text for o in operands), out=target))
        self._free += [t for t in dict.fromkeys(owned) if t != target]
        return _Operand(target, "owned")

    def _new(self) -> str:
        if not self._free:
            self.scratch += 1
            return f"w{self.scratch - 1}"
        return self._free.pop()

    def _held(self, operand: _Operand, use: Callable[[_Operand], _Operand]) -> _Operand:
        """Use an operand several times, and only then give its scratch back."""
        result = use(_Operand(operand.text, "read") if operand.kind == "owned" else operand)
        if operand.kind == "owned":
            self._free.append(operand.text)
        return result

    def _sum(self, expr: Expr) -> _Operand:
        step = 1 - expr
        if isinstance(step, ex.above):
            return self._line("torch.le({0}, {1}, out={out})", *map(self, step.args))
        # What fills a tile first, numbers last, and one without a coefficient before the others.
        terms = [term.as_coeff_Mul() for term in expr.args]
        terms.sort(key=lambda t: (t[1].is_number, self._is_small(t[1]), t[0] != 1))
        (scale, first), *rest = terms
        total = self._scaled(self(first), scale)
        for scale, term in rest:
            if term.is_number:
                total = self._line(f"torch.add({{0}}, {float(scale * term)!r}, out={{out}})", total)
            else:
                alpha = "" if scale == 1 else f", alpha={float(scale)!r}"
                total = self._line(f"torch.add({{0}}, {{1}}{alpha}, out={{out}})", total, self(term))
        return total

    def _product(self, expr: Expr) -> _Operand:
        scale, factors = expr.as_coeff_mul()
        first, *rest = sorted(factors, key=lambda f: (self._is_small(f), isinstance(f, _FUSED), is_inverse(f)))
        value = self(first)
        for factor in rest:
            value = self._times(value, factor)
        return self._scaled(value, scale)

    def _scaled(self, value: _Operand, scale: Any) -> _Operand:
        return value if scale == 1 else self._line(f"torch.mul({{0}}, {float(scale)!r}, out={{out}})", value)

    def _times(self, value: _Operand, factor: Any, out: str | None = None) -> _Operand:
        """Multiply by a factor, in one pass where torch has one: those are its own backward functions."""
        if value.kind in ("read", "owned"):
            match factor:
                case ex.hump():
                    form = "aten.sigmoid_backward.grad_input({0}, {1}, grad_input={out})"
                    return self._line(form, value, self(factor.args[0]), out=out)
                case silu_slope():
                    z = self._line("torch.clamp({0}, -top, top, out={out})", self(factor.args[0]))
                    return self._line("aten.silu_backward.grad_input({0}, {1}, grad_input={out})", value, z, out=out)
                case ex.dome():
                    form = "aten.tanh_backward.grad_input({0}, {1}, grad_input={out})"
                    return self._line(form, value, self(factor.args[0]), out=out)
                case ex.above() if factor.args[1].is_number:
                    step = repr(float(factor.args[1]))  # pyright: ignore[reportArgumentType]
                    form = f"aten.threshold_backward.grad_input({{0}}, {{1}}, {step}, grad_input={{out}})"
                    return self._line(form, value, self(factor.args[0]), out=out)
                case ex.within() if factor.args[1].is_number and factor.args[2].is_number:
                    # Its bounds are outside, those of `within` inside.
                    low, high = self._beyond(factor.args[1], -np.inf), self._beyond(factor.args[2], np.inf)
                    form = f"aten.hardtanh_backward.grad_input({{0}}, {{1}}, {low}, {high}, grad_input={{out}})"
                    return self._line(form, value, self(factor.args[0]), out=out)
        if is_inverse(factor):
            return self._line("torch.div({0}, {1}, out={out})", value, self(1 / factor), out=out)
        return self._line("torch.mul({0}, {1}, out={out})", *_tensor_first(value, self(factor)), out=out)

    def _beyond(self, bound: Expr, towards: float) -> str:
        number = np.dtype(str(self.dtype).removeprefix("torch.")).type
        return repr(float(np.nextafter(number(float(bound)), number(towards))))

    def _power(self, base: Expr, exponent: Any) -> _Operand:
        if exponent.is_Rational and exponent < 0:
            return self._line("torch.reciprocal({0}, out={out})", self(base**-exponent))
        if not exponent.is_Rational or exponent.q > 2 or exponent > 8:
            raise GateError(f"no tile form of the power {base}**{exponent}")

        def raised(b: _Operand) -> _Operand:
            whole, value = int(exponent), b
            if exponent.q == 2:
                value = self._line("torch.sqrt({0}, out={out})", b)
                whole += 1
            for _ in range(whole - 1):
                value = self._line("torch.mul({0}, {1}, out={out})", value, b)
            return value

        return self._held(self(base), raised)

    def _hump(self, s: _Operand) -> _Operand:
        return self._held(s, lambda s: self._line("torch.mul({0}, {1}, out={out})", self._complement(s), s))

    def _dome(self, t: _Operand) -> _Operand:
        return self._complement(self._line("torch.mul({0}, {0}, out={out})", t))

    def _complement(self, value: _Operand) -> _Operand:
        return self._line("torch.add({0}, 1.0, out={out})", self._line("torch.neg({0}, out={out})", value))

    def _silu_slope(self, z: _Operand) -> _Operand:
        z = self._line("torch.clamp({0}, -top, top, out={out})", z)
        ones = self._own(_Operand("1.0", "number"))
        return self._line("aten.silu_backward.grad_input({0}, {1}, grad_input={out})", ones, z)

    def _clip(self, z: _Operand, low: _Operand, high: _Operand) -> _Operand:
        if low.kind == high.kind == "number":
            return self._line("torch.clamp({0}, {1}, {2}, out={out})", z, low, high)
        return self._cap(self._line("torch.clamp_min({0}, {1}, out={out})", z, low), high)

    def _cap(self, z: _Operand, top: _Operand) -> _Operand:
        return self._line("torch.clamp_max({0}, {1}, out={out})", z, top)

    def _above(self, a: _Operand, b: _Operand) -> _Operand:
        if a.kind == "number":
            return self._line("torch.lt({1}, {0}, out={out})", a, b)
        return self._line("torch.gt({0}, {1}, out={out})", a, b)

    def _within(self, z: _Operand, low: _Operand, high: _Operand) -> _Operand:
        def both(z: _Operand) -> _Operand:
            inside = self._line("torch.ge({0}, {1}, out={out})", z, low)
            return self._line(
                "torch.mul({0}, {1}, out={out})", inside, self._line("torch.le({0}, {1}, out={out})", z, high)
            )

        return self._held(z, both)

    def _select(self, a: _Operand, b: _Operand, p: _Operand, q: _Operand) -> _Operand:
        compare = "torch.gt({1}, {0})" if a.kind == "number" else "torch.lt({0}, {1})"
        self.lines.append(f"mask = {compare.format(a.text, b.text)}")
        self._free += [o.text for o in (a, b) if o.kind == "owned"]
        if p.kind == "number":
            return self._line("{out}.masked_fill_(mask, {1})", self._own(q), p)
        if q.kind == "number":
            return self._line("{out}.masked_fill_(mask.logical_not_(), {1})", self._own(p), q)
        return self._line("torch.where(mask, {0}, {1}, out={out})", p, q)

    def _own(self, value: _Operand) -> _Operand:
        """Return scratch filled with a value."""
        if value.kind == "owned":
            return value
        target = self._new()
        fill = "fill_" if value.kind == "number" else "copy_"
        self.lines.append(f"{target}.{fill}({value.text})")
        return _Operand(target, "owned")

    def _is_small(self, expr: Expr) -> bool:
        return bool(expr.free_symbols <= self.parameters)


def _with_silu(product: Expr) -> Expr:
    """Return a product with z·σ(z) in it written as one function of z."""
    for factor in product.args:
        if isinstance(factor, ex.sigmoid) and factor.args[0] in product.args:
            return product / (factor * factor.args[0]) * silu(factor.args[0])
    return product


_FUSED = (ex.hump, ex.dome, ex.above, ex.within, silu_slope)
_OUT = "({0}, out={out})"
# One operation after another.
_CHAINS = {
    **{name: (f"torch.{name}{_OUT}",) for name in ("sigmoid", "tanh", "exp", "expm1", "log", "sqrt")},
    # Past 40 log(1 + eᶻ) is z to the last digit of a double.
    "softplus": ("aten.softplus({0}, 1, 40, out={out})",),
    "Phi": (
        "torch.mul({0}, -0.7071067811865476, out={out})",
        f"torch.erfc{_OUT}",
        "torch.mul({0}, 0.5, out={out})",
    ),
    "gauss": (
        "torch.mul({0}, {0}, out={out})",
        "torch.mul({0}, -0.5, out={out})",
        f"torch.exp{_OUT}",
        "torch.mul({0}, 0.3989422804014327, out={out})",
    ),
    "silu": ("torch.clamp_min({0}, -top, out={out})", f"aten.silu.out{_OUT}"),
    "square": ("torch.mul({0}, {0}, out={out})",),
    "relu": ("torch.clamp_min({0}, 0.0, out={out})",),
    "floored": ("torch.clamp_min({0}, -top, out={out})",),
    "finite": ("torch.clamp({0}, -top, top, out={out})",),
    "positive": ("torch.clamp({0}, floor, top, out={out})",),
}
_FORMS: dict[str, Callable[..., _Operand]] = {
    "hump": _Writer._hump,
    "dome": _Writer._dome,
    "silu_slope": _Writer._silu_slope,
    "cap": _Writer._cap,
    "clip": _Writer._clip,
    "above": _Writer._above,
    "within": _Writer._within,
    "select": _Writer._select,
}


def _tensor_first(*operands: _Operand) -> list[_Operand]:
    return sorted(operands, key=lambda o: o.kind == "number")
