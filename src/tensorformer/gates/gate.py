"""What an activation is: a scalar function, or a product of two of them, φ(g)·ψ(u)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from tensorformer.errors import GateError, ShapeError
from tensorformer.gates.kernel import Kernel, kernel
from tensorformer.gates.parameters import OPTIONAL, Parameter, Rule, check_names, checked, described, fits, is_zero


@final
@dataclass(frozen=True, eq=False, repr=False)
class Scalar:
    """A scalar activation: one formula, from which its torch function, derivatives, degree and oracle follow.

    Args:
        name: the name it is known by.
        formula: in ``x``, the parameters and the primitives of ``gates/expr.py``.
        limits: its limits at −∞ and +∞, as formulas of the parameters.
        source: where the formula comes from: an arXiv number, or the model and its file.
        needs: parameters and their ranges; none has a default.
        without: the formula and the limits that hold where a parameter that may be None is None, or one that may
            be zero is zero.
        models: models that use it in a two-matrix feed-forward layer.
        aliases: other names of the very same function.
        parameters: the values bound so far; use :meth:`bind`.
    """

    name: str
    formula: str
    limits: tuple[str, str]
    source: str
    needs: Mapping[str, Rule] = field(default_factory=dict)
    without: tuple[str, tuple[str, str]] | None = None
    models: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    # What holds with these parameters: the formula, the limits, the names in them, and their values.
    _formula: str = field(init=False)
    _limits: tuple[str, str] = field(init=False)
    _names: tuple[str, ...] = field(init=False)
    _given: tuple[Any, ...] = field(init=False)
    _ready: Kernel | None = field(init=False, default=None)  # once used: a small layer notices every look-up

    def __post_init__(self) -> None:
        check_names(self.name, self.needs)
        optional = [n for n, rule in self.needs.items() if rule in OPTIONAL]
        if self.without is not None and len(optional) != 1:
            raise GateError(f"{self.name!r}: a formula without a parameter needs one that is >= 0 or may be None")
        parameters = self.parameters.items()
        absent = [n for n, v in parameters if self.without and n in optional and (v is None or is_zero(v))]
        formula, limits = self.without if absent and self.without else (self.formula, self.limits)
        object.__setattr__(self, "_formula", formula)
        object.__setattr__(self, "_limits", limits)
        object.__setattr__(self, "_names", tuple(n for n in self.needs if n not in absent))
        object.__setattr__(self, "_given", tuple(v for n, v in parameters if n not in absent))

    def __repr__(self) -> str:
        return described(self.name, self.parameters)

    def __getstate__(self) -> dict[str, Any]:
        # A kernel is printed code: it stays in this process.
        return {**self.__dict__, "_ready": None}

    def __call__(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the function at ``x``.

        Args:
            x: any shape, stride and floating dtype; bfloat16 and float16 are computed in float32, rounded once.

        Returns:
            The same shape and dtype; the formula's limit at ±∞, NaN at NaN.

        Raises:
            GateError: a parameter is not bound.
            ShapeError: ``x`` is not floating, or a tensor parameter does not broadcast to its shape.
        """
        if not x.is_floating_point():
            raise ShapeError(f"{self.name}: x is {x.dtype}: write .float()")
        return self._kernel(x)(x, *self._given)

    def derivative(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the first derivative at ``x``: finite limits at ±∞, torch's convention at a kink."""
        return self._kernel(x).partial(0)(x, *self._given)

    def bind(self, **parameters: Parameter) -> Scalar:
        """Return this function with its parameters set: numbers, or tensors, which then get gradients.

        Args:
            parameters: floats; or floating tensors that broadcast to the input (their values are not read, so
                that a training step never waits for them: one that is exactly 0 may give NaN at ±∞, where the
                number 0 gives the limit); or None where the formula has a form without.

        Raises:
            GateError: a parameter is unknown, missing, out of its range, or NaN.
        """
        return replace(self, parameters=checked(self.name, self.needs, {**self.parameters, **parameters}))

    @property
    def expr(self) -> Any:
        """The formula as a SymPy expression in ``x`` and the parameters."""
        from tensorformer.gates import expr

        return expr.parse(self._formula, self._names)

    @property
    def derivative_expr(self) -> Any:
        """The derivative by ``x`` as a SymPy expression."""
        from tensorformer.gates import expr

        return expr.derivative(self.expr, "x")

    @property
    def latex(self) -> str:
        """The formula in LaTeX, in ``x``."""
        from tensorformer.gates import expr

        return expr.latex(self.expr)

    @property
    def degree(self) -> int | None:
        """The degree as a polynomial in ``x``; None where it is not one."""
        from tensorformer.gates import expr

        return expr.degree(self.expr)

    @property
    def second_moment(self) -> float:
        """E[f(z)²] for z ~ N(0, 1), by quadrature: what an initialisation needs to keep variances."""
        from tensorformer.gates import oracle

        self._require()
        return oracle.second_moment(self._formula, self._names, self._floats())

    @property
    def smoothness(self) -> int | None:
        """How many derivatives are continuous: k for C^k, −1 where the function itself jumps, None for C^∞."""
        from tensorformer.gates import shape

        self._require()
        return shape.smoothness(self._formula, self._names, self._floats())

    @property
    def image(self) -> tuple[float, float]:
        """The infimum and the supremum of its values, which may be infinite."""
        from tensorformer.gates import shape

        self._require()
        ends = tuple(float(self.oracle(side * math.inf)) for side in (-1, 1))
        return shape.image(self._formula, self._names, self._floats(), ends)

    @property
    def cost(self) -> dict[str, int]:
        """How many operations of each kind an element costs, common parts counted once; σ is exp, add and div."""
        from tensorformer.gates import shape

        return shape.cost(self.expr)

    def oracle(self, x: float | Sequence[float] | Tensor, digits: int = 50, order: int = 0) -> Any:
        """Return the function, or a derivative of it, computed with mpmath from the same formula.

        Args:
            x: a float, a sequence of floats or a tensor, taken as the exact binary numbers they are.
            digits: significant decimal digits.
            order: how many times to differentiate by x.

        Returns:
            An ``mpmath.mpf``, or a flat list of them; at ±∞ the declared limit (order 0) or the value far out.
        """
        from tensorformer.gates import oracle

        self._require()
        values = x.detach().flatten().tolist() if isinstance(x, Tensor) and x.dim() else x
        floats = self._floats()

        def at(v: float) -> Any:
            return oracle.evaluate(self._formula, self._names, floats, self._limits, float(v), digits, order)

        return [at(v) for v in values] if isinstance(values, Sequence) else at(float(values))

    def triton_body(self, x: str = "x", value: str = "y", derivative: str | None = None) -> list[str]:
        """Return the lines of Triton that compute the function, and its derivative if a name for it is given.

        Args:
            x: the variable that holds the input, in float32. Parameters are variables of their own names.
            value: the variable to assign the function to.
            derivative: the variable to assign the derivative to.

        Raises:
            GateError: the formula uses a function that has no Triton form.
        """
        from tensorformer.gates import expr
        from tensorformer.gates.triton_source import triton_lines

        outputs = {value: self.expr}
        if derivative is not None:
            outputs[derivative] = self.derivative_expr
        symbol = expr.symbol(x)
        return triton_lines({n: e.subs(expr.x, symbol) for n, e in outputs.items()}, f"{x}_")

    def _kernel(self, x: Tensor) -> Kernel:
        if self.needs:
            self._require()
            for v in self._given:
                if isinstance(v, Tensor) and not fits(v.shape, x.shape):
                    text = f"{self.name}: a parameter of shape {tuple(v.shape)} does not fit {tuple(x.shape)}"
                    raise ShapeError(text)
        if self._ready is not None:
            return self._ready
        built = kernel(self._formula, ("x", *self._names))
        if not torch.compiler.is_compiling():
            object.__setattr__(self, "_ready", built)
        return built

    def _require(self) -> None:
        if len(self.parameters) != len(self.needs):
            checked(self.name, self.needs, self.parameters)

    def _floats(self) -> tuple[float, ...]:
        for v in self._given:
            if isinstance(v, Tensor) and v.numel() != 1:
                raise GateError(f"{self.name}: this needs plain numbers, and a parameter has shape {tuple(v.shape)}")
        return tuple(float(v) for v in self._given)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Gate:
    """A gated activation φ(g)·ψ(u).

    Args:
        name: the name it is known by.
        gate: φ, applied to the gate projection.
        value: ψ, applied to the up projection.
        source: where the formula comes from.
        models: models that use it.
        aliases: other names of the very same gate.
    """

    name: str
    gate: Scalar
    value: Scalar
    source: str
    models: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return described(self.name, self.parameters)

    def __call__(self, g: Float[Tensor, "*shape"], u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return φ(g)·ψ(u).

        Args:
            g: the gate projection; any shape, stride and floating dtype.
            u: the up projection, of the same shape and dtype.

        Returns:
            The same shape and dtype; each factor is rounded once, and the product once.

        Raises:
            GateError: a parameter is not bound.
            ShapeError: g and u differ in shape or dtype.
        """
        if g.shape != u.shape or g.dtype != u.dtype:
            raise ShapeError(
                f"{self.name}: g is {tuple(g.shape)} {g.dtype} and u {tuple(u.shape)} {u.dtype}: make them alike"
            )
        # The linear branch as it is: most gates have one, and a small layer notices every call.
        return (g if self.gate._formula == "x" else self.gate(g)) * (u if self.value._formula == "x" else self.value(u))

    @property
    def is_one_pass(self) -> bool:
        """Whether torch has each of the two functions as one operation, with its backward."""
        return all(kernel(s._formula, ("x", *s._names)).native is not None for s in (self.gate, self.value))

    @property
    def needs(self) -> Mapping[str, Rule]:
        """The parameters of both functions, and their ranges."""
        return {**self.gate.needs, **self.value.needs}

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The values bound so far."""
        return {**self.gate.parameters, **self.value.parameters}

    def bind(self, **parameters: Parameter) -> Gate:
        """Return this gate with its parameters set: numbers, or tensors, which then get gradients.

        Raises:
            GateError: a parameter is unknown, missing, out of its range, or NaN.
        """
        known = checked(self.name, self.needs, {**self.parameters, **parameters})
        parts = [s.bind(**{n: known[n] for n in s.needs}) for s in (self.gate, self.value)]
        return replace(self, gate=parts[0], value=parts[1])

    @property
    def expr(self) -> Any:
        """The formula as a SymPy expression in ``g``, ``u`` and the parameters."""
        from tensorformer.gates import expr

        return self.gate.expr.subs(expr.x, expr.g) * self.value.expr.subs(expr.x, expr.u)

    @property
    def latex(self) -> str:
        """The formula in LaTeX, in ``g`` and ``u``."""
        from tensorformer.gates import expr

        return expr.latex_product(self.gate.expr.subs(expr.x, expr.g), self.value.expr.subs(expr.x, expr.u))

    @property
    def degree(self) -> int | None:
        """The total degree as a polynomial in g and u; None where it is not one."""
        degrees = (self.gate.degree, self.value.degree)
        return None if None in degrees else sum(d for d in degrees if d is not None)

    @property
    def second_moment(self) -> float:
        """E[φ(z₁)²]·E[ψ(z₂)²] for independent z₁, z₂ ~ N(0, 1)."""
        return self.gate.second_moment * self.value.second_moment

    @property
    def cost(self) -> dict[str, int]:
        """How many operations of each kind a pair (g, u) costs."""
        from tensorformer.gates import shape

        return shape.cost(self.expr)

    def triton_body(self, backward: bool = False) -> list[str]:
        """Return the lines of Triton that compute ``h`` from ``g`` and ``u``; or, backward, also ``dg`` and ``du``.

        ``g`` and ``u`` hold float32; parameters are variables of their own names; ``dg`` and ``du`` are the partial
        derivatives of ``h``, to be multiplied by its gradient.
        """
        lines, names = [], {}
        for scalar, x in ((self.gate, "g"), (self.value, "u")):
            f, slope = f"f_{x}", f"d_{x}"
            body = dict(line.split(" = ", 1) for line in scalar.triton_body(x, f, slope if backward else None))
            # A name or a constant is written where it is used: a bilinear gate is then one product.
            for n in (f, slope):
                names[n] = body.pop(n) if body.get(n, "f_") in (x, "1.0") else n
            lines += [f"{n} = {e}" for n, e in body.items()]
        lines.append(f"h = {names['f_g']}*{names['f_u']}")
        if backward:
            for n, a, b in (("dg", "d_g", "f_u"), ("du", "d_u", "f_g")):
                lines.append(f"{n} = {names[b]}" if names[a] == "1.0" else f"{n} = {names[a]}*{names[b]}")
        return lines
