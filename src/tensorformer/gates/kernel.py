"""An expression as a differentiable torch function: built on first use, one for every derivative asked for."""

from __future__ import annotations

import linecache
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, final

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

Argument = Tensor | float
PLAIN = (Tensor, torch.nn.Parameter)  # types whose operators nobody intercepts


class _Native(NamedTuple):
    """What torch computes in one pass: the function, and grad·slope, where it has that.

    ``differentiable`` names the dtypes in which autograd's own gradient of ``value`` is right everywhere. Where
    ``wild``, both are NaN at ±∞ in torch, and right once ∞ is brought to the largest finite number: for ``value``
    on the left only, for ``pull`` on both sides.
    """

    value: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor] | None = None
    differentiable: tuple[torch.dtype, ...] = ()
    wild: bool = False


@final
class Kernel:
    """One expression of ``x`` and parameters, or one of its partial derivatives, on torch tensors.

    float64 and float32 are computed as they are, bfloat16 and float16 in float32 and rounded once.
    """

    def __init__(self, formula: str, names: tuple[str, ...], path: tuple[str, ...]) -> None:
        # SymPy takes half a second to load: only here, when a formula is first used.
        from tensorformer.gates import expr
        from tensorformer.gates.torch_source import torch_source

        self.formula, self.names, self.path = formula, names, path
        expression = expr.parse(formula, names[1:])
        for name in path:
            expression = expr.derivative(expression, name)
        self.is_zero = bool(expression == 0)
        self.native = _NATIVE.get(str(expression))
        own = set(map(expr.symbol, names[1:]))
        # Such as softplus(α): torch's functions take tensors, and a parameter may be a number.
        self.transforms_parameters = any(f.free_symbols and f.free_symbols <= own for f in _calls(expression))
        self.source = torch_source(expression, names)
        file = f"<tensorformer {formula} {'/'.join(path)}>"
        # Tracebacks and debuggers can then show the printed lines.
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(self.source, file, "exec"), scope)
        self.printed: Callable[..., Any] = scope["value"]

    def partial(self, index: int) -> Kernel:
        """Return the derivative by argument ``index``: 0 is x, then the parameters in order."""
        return kernel(self.formula, self.names, (*self.path, self.names[index]))

    def __call__(self, x: Tensor, *parameters: Argument) -> Tensor:
        """Return the value, differentiable any number of times, by x and by the parameters that are tensors."""
        if self.native is not None and x.dtype in self.native.differentiable:
            return self.native.value(x)
        compiling = torch.compiler.is_compiling()
        if compiling and not _needs_gradient(x, *parameters):
            return self.value(x, *parameters)  # Dynamo can't trace an autograd function that nobody differentiates
        if not compiling and transforming():
            if _nested_forward():
                # torch hands an autograd function's jvp nothing of the outer forward derivative: the formula itself.
                return self._wide(x, *parameters).to(x.dtype)
            return _Transformable.apply(self, x, *parameters)  # pyright: ignore[reportReturnType]
        if compiling or (parameters and any(isinstance(p, Tensor) for p in parameters)):
            return _Elementwise.apply(self, x, *parameters)  # pyright: ignore[reportReturnType]
        return _Eager.apply(self, x, parameters)  # pyright: ignore[reportReturnType]

    def value(self, x: Tensor, *parameters: Argument) -> Tensor:
        """Return the value alone, in the dtype of ``x``; autograd sees nothing that could be trusted at ±∞."""
        if self.native is None:
            return self._wide(x, *parameters).to(x.dtype)
        return self.native.value(x.clamp(min=-torch.finfo(x.dtype).max) if self.native.wild else x)

    def calm_value(self, x: Tensor, *parameters: Argument) -> tuple[Tensor, bool]:
        """Return the value, and whether it is finite throughout, which spares a pass here and one in ``pull``."""
        if self.native is not None and self.native.wild and x.is_cpu and type(x) in PLAIN and not recording():
            y = self.native.value(x)
            # One reading pass, half the price of a clamp. On another device, asking would wait for it.
            if math.isfinite(y.sum().item()):
                return y, True
        return self.value(x, *parameters), False

    def pull(self, calm: bool, index: int, grad: Tensor, x: Tensor, *parameters: Argument) -> Tensor | None:
        """Return grad · ∂value/∂argument, elementwise, unrounded where it was computed in float32; None for zero."""
        # create_graph: each factor must stay differentiable. (A compiled graph has no second backward.)
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if self.native is not None and self.native.pull is not None and index == 0 and not again:
            if self.native.wild and not calm:
                top = torch.finfo(x.dtype).max
                x = x.clamp(-top, top)
            return self.native.pull(grad, x)
        slope = self.partial(index)
        if slope.is_zero:
            return None
        if again:
            return grad * slope(x, *parameters)
        wide = slope._wide(x, *parameters)
        return grad.to(wide.dtype) * wide

    def _wide(self, x: Tensor, *parameters: Argument) -> Tensor:
        dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        values = [p.to(dtype) if isinstance(p, Tensor) else p for p in parameters]
        if self.transforms_parameters:
            wide = {"dtype": torch.float64, "device": "cpu"}
            values = [v if isinstance(v, Tensor) else torch.tensor(v, **wide) for v in values]
        result = self.printed(x.to(dtype), *values)
        if not isinstance(result, Tensor):
            return torch.full_like(x, result, dtype=dtype)
        return result.to(dtype).expand(x.shape)  # a choice between two numbers has torch's default dtype


def _needs_gradient(*arguments: Argument) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)


def _calls(expression: Any) -> set[Any]:
    import sympy

    return expression.atoms(sympy.Function)


class _Elementwise(torch.autograd.Function):
    """Saves its inputs and nothing else, and never writes into them."""

    @staticmethod
    def forward(kernel: Kernel, x: Tensor, *parameters: Argument) -> Tensor:
        return kernel.value(x, *parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kernel, *arguments = inputs
        ctx.kernel, ctx.calm = kernel, False
        ctx.numbers = tuple(None if isinstance(a, Tensor) else a for a in arguments)
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        arguments = _arguments(ctx)
        result: list[Tensor | None] = [None]
        for i, argument in enumerate(arguments):
            pulled = ctx.kernel.pull(ctx.calm, i, grad, *arguments) if ctx.needs_input_grad[i + 1] else None
            if pulled is not None and i > 0:
                pulled = pulled.sum_to_size(argument.shape)
            result.append(pulled if pulled is None else pulled.to(argument.dtype))
        return tuple(result)


class _Transformable(_Elementwise):
    """With the rules of torch.func. (torch.compile refuses a function that has them.)"""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        arguments = _arguments(ctx)
        total = torch.zeros_like(arguments[0])
        for i, tangent in enumerate(tangents[1:]):
            moved = None if tangent is None else ctx.kernel.pull(ctx.calm, i, tangent.expand(total.shape), *arguments)
            total = total if moved is None else total + moved
        return total.to(arguments[0].dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        kernel, *arguments = args
        x_dims = arguments[0].dim() - (in_dims[1] is not None)
        moved: list[Argument] = []
        for i, (argument, dim) in enumerate(zip(arguments, in_dims[1:], strict=True)):
            if isinstance(argument, Tensor):
                if dim is not None:
                    argument = argument.movedim(dim, 0)
                    # Behind the mapped axis, a smaller parameter still has to meet the last axes of x.
                    shape = (argument.shape[0], *[1] * (x_dims - argument.dim() + 1), *argument.shape[1:])
                    argument = argument.reshape(shape)
                elif i == 0:
                    argument = argument.expand(info.batch_size, *argument.shape)
            moved.append(argument)
        return kernel(*moved), 0


class _Eager(torch.autograd.Function):
    """The same for numbers as parameters, in the form torch.func refuses: half the overhead on a small input."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, x: Tensor, parameters: tuple[float, ...]) -> Tensor:  # pyright: ignore
        result, ctx.calm = kernel.calm_value(x, *parameters)
        ctx.kernel, ctx.parameters = kernel, parameters
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:  # pyright: ignore
        (x,) = ctx.saved_tensors
        if ctx.calm and not torch.is_grad_enabled():
            return None, ctx.kernel.native.pull(grad, x), None
        pulled = ctx.kernel.pull(ctx.calm, 0, grad, x, *ctx.parameters)
        return None, pulled if pulled is None else pulled.to(x.dtype), None


# Private in torch; should one go, its question is answered with the slower form, which is always right.
_INSIDE = getattr(torch._C, "_functorch", None)
_interpreters: Callable[[], Any] = getattr(_INSIDE, "get_interpreter_stack", lambda: None)
_is_batch: Callable[[Tensor], bool] = getattr(_INSIDE, "is_legacy_batchedtensor", lambda _: False)
_functorch: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_tracing: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: True)


def transforming() -> bool:
    """Say whether torch.func, or forward-mode differentiation, looks on."""
    return _functorch() or getattr(forward_ad, "_current_level", 0) >= 0


def is_batch(x: Tensor) -> bool:
    """Say whether ``x`` is a batch of gradients in disguise, as ``is_grads_batched`` makes them."""
    return _is_batch(x) or _functorch()


def _nested_forward() -> bool:
    return sum(i.key().name == "Jvp" for i in _interpreters() or ()) > 1


def recording() -> bool:
    """Say whether operators are being recorded, by a dispatch mode or torch.jit: what bypasses them would be lost."""
    return _modes() > 0 or _tracing() is not None


def _arguments(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if number is None else number for number in ctx.numbers]


# Keyed by the printed expression, so that a formula written anywhere finds its one-pass form.
_WIDE = (torch.float32, torch.float64)
_ANY = (*_WIDE, torch.bfloat16, torch.float16)
_NATIVE = {
    "x": _Native(lambda x: x, differentiable=_ANY),
    "relu(x)": _Native(torch.relu, differentiable=_ANY),
    "relu(x)**2": _Native(lambda x: torch.relu(x).square(), differentiable=_ANY),
    # In bfloat16 torch takes σ' = y(1 − y) from the rounded y: a quarter off at x = 5.
    "sigmoid(x)": _Native(torch.sigmoid, differentiable=_WIDE),
    "tanh(x)": _Native(torch.tanh, differentiable=_WIDE),
    "x*sigmoid(x)": _Native(F.silu, torch.ops.aten.silu_backward.default, wild=True),
}

_SLOTS: dict[tuple[str, tuple[str, ...], tuple[str, ...]], str] = {}
_BUILT = SimpleNamespace()
_BUILDING = threading.RLock()


def kernel(formula: str, names: tuple[str, ...], path: tuple[str, ...] = ()) -> Kernel:
    """Return the kernel of ``formula``, or of its derivative along ``path``, building it on first use."""
    return getattr(_BUILT, _slot(formula, names, path))


def _slot(formula: str, names: tuple[str, ...], path: tuple[str, ...]) -> str:
    """Return the kernel's attribute, building it if need be: under torch.compile this runs at once, untraced."""
    key = (formula, names, path)
    if key not in _SLOTS:
        with _BUILDING:
            if key not in _SLOTS:
                built = Kernel(formula, names, path)
                slot = f"kernel_{len(_SLOTS)}"
                setattr(_BUILT, slot, built)
                _SLOTS[key] = slot
    return _SLOTS[key]


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo, and with that of SymPy.
_slot._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
