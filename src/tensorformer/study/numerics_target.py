"""The implementation under study: found by name, called as its layout asks, and refused in one line if it can't be."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from tensorformer.errors import ConfigError, TensorformerError, suggest
from tensorformer.gates import Gate, Scalar
from tensorformer.ops.operands import LAYOUTS, split
from tensorformer.study.numerics_report import word

IMPLS = ("reference", "fast", "native", "triton")
_EXAMPLE = "write module:function, such as torch.nn.functional:silu"


def load(name: str, declared: Gate | Scalar, layout: str | None) -> Callable[..., Any]:
    """Return what ``name`` names: an implementation of ``act_and_mul``, or a ``module:function``.

    Args:
        name: reference, fast, native or triton; or a module (from the working directory as well), a colon, and
            attributes or keys of dictionaries with dots between, such as transformers.activations:ACT2FN.gelu_new.
        declared: the gate that one of ours is to compute.
        layout: of its input.

    Raises:
        ConfigError: there is nothing of that name, or it can't be called.
    """
    if name in IMPLS:
        return _ours(name, declared, layout)
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ConfigError(f"implementation {name!r}: {_EXAMPLE}, or one of {', '.join(IMPLS)}")
    found: Any = _module(name, module)
    for part in path.split("."):
        found = _member(name, found, part)
    if isinstance(found, type):
        try:
            found = found()
        except Exception as e:
            raise ConfigError(f"{name}: is a class that takes arguments ({_short(e)}); name a function") from None
    if not callable(found):
        raise ConfigError(f"{name}: is a {type(found).__name__}, which can't be called; {_EXAMPLE}")
    return found


def _ours(impl: str, declared: Gate | Scalar, layout: str | None) -> Callable[..., Any]:
    if isinstance(declared, Scalar):
        if impl == "reference":
            return declared
        raise ConfigError(f"{impl!r} computes gates, and {declared.name!r} is a scalar: name a gate, or {_EXAMPLE}")
    from tensorformer.ops.act_and_mul import act_and_mul

    if layout is None:
        return lambda g, u: act_and_mul((g, u), declared, impl=impl)  # pyright: ignore[reportArgumentType]
    return lambda x: act_and_mul(x, declared, layout=layout, impl=impl)  # pyright: ignore[reportArgumentType]


def _module(name: str, module: str) -> Any:
    # A console script does not have the working directory on its path, where people keep what they try.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise ConfigError(f"{name}: there is no module {e.name!r} here; {_EXAMPLE}") from None
    except Exception as e:
        raise ConfigError(f"{name}: importing {module} fails: {_short(e)}") from None


def _member(name: str, owner: Any, part: str) -> Any:
    if isinstance(owner, Mapping) and part in owner:
        return owner[part]
    with contextlib.suppress(AttributeError):
        return getattr(owner, part)
    known = [str(k) for k in owner] if isinstance(owner, Mapping) else [n for n in dir(owner) if not n.startswith("_")]
    near = suggest(part, known)
    raise ConfigError(f"{name}: there is no {part!r} in it{near if len(known) < 40 or 'mean' in near else ''}")


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


@final
class Target:
    """A callable, called with the branches as the declared gate has them.

    Args:
        function: of x; or of g and u; or, with a layout, of (..., 2·d_ff).
        n_inputs: 1 for a scalar, 2 for a gate.
        layout: how it takes a gate's branches: in one tensor, or as two where it is None.

    Raises:
        ConfigError: the function does not take as many arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str, n_inputs: int, layout: str | None) -> None:
        self.function, self.name, self.n_inputs, self.layout = function, name, n_inputs, layout
        n_arguments = n_inputs if layout is None else 1
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a function in C need not say what it takes
            return
        if next(iter(signature.parameters), "") == "self":
            raise ConfigError(f"{name}: is a method; name a function that calls it on an object")
        try:
            signature.bind(*[None] * n_arguments)
        except TypeError as e:
            text = f"{name}: is called with {('x', 'g and u')[n_arguments - 1]}, and that does not fit it ({e})"
            raise ConfigError(text + self._hint()) from None

    def __call__(self, args: tuple[Tensor, ...]) -> Tensor:
        """Return its output on ``args``, the branches, in float64; gradients pass.

        Raises:
            ConfigError: it fails, or does not return a tensor of the right shape.
        """
        handed = args if self.layout is None else (pack(args[0], args[1], self.layout),)
        try:
            # A copy each: a function that writes into its input must not spoil the next call.
            result: Any = self.function(*(a.clone() for a in handed))
        except TensorformerError:
            raise
        except Exception as e:
            shape = tuple(handed[0].shape)
            raise ConfigError(
                f"{self.name}: fails on {word(handed[0].dtype)} of shape {shape}: {_short(e)}{self._hint()}"
            ) from e
        if not isinstance(result, Tensor) or not result.is_floating_point():
            kind = result.dtype if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(f"{self.name}: returns {kind}, not a floating tensor; name a function that does")
        if result.shape != args[0].shape:
            text = f"{self.name}: returns shape {tuple(result.shape)} for {tuple(handed[0].shape)}"
            raise ConfigError(f"{text}, where {tuple(args[0].shape)} is due{self._hint()}")
        return result.double()

    def accepts(self, dtype: torch.dtype, args: tuple[Tensor, ...]) -> bool:
        """Return whether it runs in ``dtype``."""
        try:
            with torch.no_grad():
                self(tuple(a[:3].to(dtype) for a in args))
        except TensorformerError:
            return False
        return True

    def check_repeats(self, args: tuple[Tensor, ...]) -> None:
        """Refuse a function whose answer to one input differs from call to call: its noise would pass for a dtype."""
        with torch.no_grad():
            first, second = self(args), self(args)
        if not torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0)):
            raise ConfigError(f"{self.name}: gives another result for the same input when it is called again")

    def _hint(self) -> str:
        if self.n_inputs == 1:
            return ""
        if self.layout is not None:
            return "; without a layout it is called with g and u"
        return f"; if one tensor holds both, say in which layout: {', '.join(LAYOUTS)}"


def gradients(function: Callable[[tuple[Tensor, ...]], Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Return the derivative of the sum of ``function(args)`` by each of them, in float64, or None."""
    leaves = tuple(a.detach().clone().requires_grad_() for a in args)
    try:
        result = function(leaves)
        if not result.requires_grad:
            return None
        found = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    except Exception:  # whatever a backward of someone else's raises, it gives none
        return None
    return tuple(torch.zeros_like(a).double() if d is None else d.double() for a, d in zip(leaves, found, strict=True))


def pack(g: Tensor, u: Tensor, layout: str) -> Tensor:
    """Return (..., 2·d_ff) in ``layout``."""
    if layout == "interleaved":
        return torch.stack((g, u), -1).flatten(-2)
    return torch.cat((g, u) if layout == "gate_up" else (u, g), -1)


def readings(layout: str | None) -> Iterator[tuple[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]]:
    """Yield the ways to mistake the branches: in words, and what g and u become then."""
    if layout is None or layout == "interleaved":
        yield "gate and up are swapped", _swap
    if layout is None:
        return
    for other in LAYOUTS:
        if other != layout:
            swapped = "gate and up are swapped: " if "interleaved" not in (other, layout) else ""
            yield f"{swapped}the input is read as {other}", _reader(layout, other)
    if layout != "interleaved":
        yield (
            "the input is read as interleaved, up first",
            lambda g, u: _swap(*split(pack(g, u, layout), "interleaved")),
        )


def _swap(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return u, g


def _reader(packed: str, read: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda g, u: split(pack(g, u, packed), read)
