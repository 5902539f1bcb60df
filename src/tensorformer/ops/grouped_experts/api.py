"""The contract of grouped experts: what goes in and out, what is refused, and what runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorformer.errors import ConfigError
from tensorformer.gates import Gate, Scalar
from tensorformer.gates.kernel import PLAIN, transforming
from tensorformer.ops.grouped_experts import native, reference, triton
from tensorformer.ops.grouped_experts.activation import Activation, ready
from tensorformer.ops.grouped_experts.check import Operands, check_impl, check_operands, in_one_dtype
from tensorformer.ops.grouped_experts.compiled import grouped_experts_in_graph
from tensorformer.ops.grouped_experts.function import KERNELS, GroupedExperts


def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate | Scalar | str,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    layout: str = "gate_up",
    impl: str = "auto",
) -> Tensor:
    """Send each token through the experts it was routed to, and sum what they return.

    y_n = Σ_j w_nj · E_{i_nj}(x_n) with E_e(x) = (φ(x G_e + g_e) · ψ(x U_e + u_e)) D_e + b_e, where G and U are the
    halves of ``gate_up``; or, for a function f of one variable, E_e(x) = f(x A_e + a_e) D_e + b_e. All of an expert is
    weighted, its last bias too. There is no capacity: no token is dropped, whatever the load. An expert without a
    token costs nothing and gets a zero gradient. What is not finite in one token stays in its row of y and of dx.

    Products are taken in the dtype of x, or in that of autocast (float64 stays), and summed over experts in float32
    or better. For backward ``fast`` keeps its operands, 16 bytes for each choice of an expert, and the projections
    x G, x U; a second derivative is right too, and costs what the reference costs.

    Args:
        x: (N, d), of any float dtype and strides; N may be 0.
        gate_up: (E, d, 2·d_ff), with the two halves of each expert in one matrix; for a function (E, d, d_ff).
        down: (E, d_ff, d).
        gate: a gate or a function of one variable, or the name of one without parameters. Parameters that are
            tensors fit (E, 1, d_ff), and get gradients.
        indices: (N, k) integers from 0 to E − 1, which experts each token goes to; one named twice counts twice.
        weights: (N, k), of any float dtype.
        gate_up_bias: (E, 2·d_ff), laid out as ``gate_up``; for a function (E, d_ff).
        down_bias: (E, d).
        layout: where the halves lie: "gate_up", "up_gate" or "interleaved" (gpt-oss: g first). It belongs to the
            checkpoint.
        impl: "auto", "reference" (a plain loop over experts), "fast" (rows sorted by expert), "native" (the same in
            C++, compiled on first use: each expert on one thread, and the same bits for any number of them; float32
            and bfloat16) or "triton" (the same in a few kernels, on a GPU; it has no gradient by parameters that are
            tensors). On a GPU `auto` takes "triton" where it can run; on a CPU "native" where that was built before,
            outside of graphs, and there are two experts for each thread at least; else "fast".

    Returns:
        y (N, d), in the dtype of x or of autocast.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit together, there are no experts, or (found in eager mode) an
            index names none.
        GateError: there is no such gate, or a parameter of it is missing.
        ConfigError: there is no such layout or ``impl``, it can't run here, or a graph can't hold the gate.

    Source: Shazeer et al. 2017 (arXiv 1701.06538); without dropping: Gale et al. 2022 (arXiv 2211.15841).
    """
    operands, activation, name = _checked(
        x, gate_up, down, gate, indices, weights, gate_up_bias, down_bias, layout, impl
    )
    if name == "reference":
        with torch.autocast(x.device.type, enabled=False):
            return reference.forward(operands, indices, activation)
    tensors = (*operands, *activation.tensors.values())
    if torch.compiler.is_compiling() or x.is_meta or type(x) not in PLAIN:
        return grouped_experts_in_graph(operands, indices, activation, name)
    kernels = KERNELS[name]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return GroupedExperts.apply(kernels, activation, indices, *tensors)  # pyright: ignore[reportReturnType]
    return kernels.forward(operands, kernels.groups_of(operands, indices), activation, keep=False)[0]


def resolve(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate | Scalar | str,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    layout: str = "gate_up",
    impl: str = "auto",
) -> str:
    """Return the implementation that `grouped_experts` would run for these arguments, without running it.

    Raises:
        ShapeError, GateError, ConfigError: as `grouped_experts` does.
    """
    return _checked(x, gate_up, down, gate, indices, weights, gate_up_bias, down_bias, layout, impl)[-1]


def _checked(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate | Scalar | str,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    layout: str,
    impl: str,
) -> tuple[Operands, Activation, str]:
    """Return the operands in one dtype, the activation, and which implementation runs; or refuse them."""
    activation = ready(gate, layout)
    operands = Operands(x, gate_up, down, weights, gate_up_bias, down_bias)
    check_impl(impl)
    check_operands(operands, indices, activation)
    operands = in_one_dtype(operands)
    return operands, activation, _choose(operands, activation, impl)


def _choose(operands: Operands, activation: Activation, impl: str) -> str:
    # torch.func sees through the formula, and not through an autograd function that writes into memory.
    through = not torch.compiler.is_compiling() and transforming()
    if impl == "triton" or (impl == "auto" and operands.x.device.type == "cuda" and not through):
        reason = triton.why_not(operands, activation)
        if reason is None:
            return "triton"
        if impl == "triton":
            raise ConfigError(f'impl "triton" of grouped_experts {reason}')
    if impl == "native":
        if reason := native.why_not(operands, activation):
            raise ConfigError(f'impl "native" of grouped_experts {reason}')
        if not torch.compiler.is_compiling():
            native.prepare(activation, operands.x.dtype)
        return "native"
    if impl == "auto" and operands.x.device.type == "cpu" and not torch.compiler.is_compiling():
        # An expert is worked on by one thread: with few of them, others would wait.
        many = len(operands.down) >= 2 * torch.get_num_threads()
        if many and native.why_not(operands, activation) is None and native.is_ready(activation, operands.x.dtype):
            return "native"
    return "reference" if impl == "reference" or through else "fast"
