"""`study numerics` on code of others: every activation of transformers, gpt-oss's experts; and on our own kernels."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tensorformer.gates import activation
from tensorformer.study.numerics import numerics

OAI = activation("swiglu_oai", alpha=1.702, limit=7.0)
# What each name of transformers is here; prelu is a learned leaky ReLU, sqrtsoftplus a router's score.
ACT2FN = {
    "gelu": "gelu",
    "gelu_10": "gelu_10",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "hardswish": "hard_swish",
    "laplace": "laplace",
    "leaky_relu": "leaky_relu",
    "linear": "identity",
    "mish": "mish",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "relu6": "relu6",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "prelu": "leaky_relu",
    "xielu": "xielu",
    "sqrtsoftplus": None,
}


@pytest.fixture
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.real
@pytest.mark.usefixtures("quiet")
def test_every_activation_of_transformers_is_recognised() -> None:
    from transformers.activations import ACT2FN as THEIRS

    assert set(ACT2FN) == set(THEIRS)
    for name, ours in ACT2FN.items():
        report = numerics(f"transformers.activations:ACT2FN.{name}", "identity", dtypes=())
        assert (report.nearest.name if report.nearest.fits else None) == ours, name
    assert numerics("transformers.activations:ACT2FN.gelu_new", "gelu").verdict.startswith(
        "wrong definition: it is not gelu, 0.000473 off at x = 2.7: it computes gelu_tanh"
    )


@pytest.fixture
def experts(quiet: None) -> Any:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))


@pytest.mark.real
def test_the_gate_of_gpt_oss_is_ours_rounded_after_every_operation(experts: Any) -> None:
    report = numerics(experts._apply_gate, OAI, layout="interleaved")
    assert report.definition.fits
    assert report.definition.derivative is not None
    assert report.definition.derivative.fits
    assert report.approximation is not None
    assert report.approximation.beyond == 0
    assert report.fusion[0].place == "after every operation, in bfloat16"


@pytest.mark.real
@pytest.mark.parametrize("layout", ["gate_up", "up_gate"])
def test_the_gate_of_gpt_oss_in_another_layout_is_named(experts: Any, layout: str) -> None:
    report = numerics(experts._apply_gate, OAI, layout=layout, dtypes=())
    assert report.definition.mistake == "the input is read as interleaved"
    assert report.nearest.name == "swiglu_oai"


@pytest.mark.real
def test_the_gate_of_gpt_oss_with_another_limit_is_named(experts: Any) -> None:
    report = numerics(experts._apply_gate, OAI.bind(limit=10.0), layout="interleaved", dtypes=())
    assert report.definition.mistake == "limit is 7, not 10"


@pytest.mark.parametrize("layout", [None, "gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_our_own_kernels_are_right(impl: str, layout: str | None) -> None:
    report = numerics(impl, OAI, layout=layout, dtypes=(torch.float32, torch.bfloat16, torch.float16))
    assert report.verdict.startswith("right: nothing but rounding")
    place = "once, at the end" if impl == "fast" else "after φ, after ψ and at the end"
    assert [f.place for f in report.fusion] == [place, place]
    assert all(e.agrees for e in (*report.tails, *report.limits))
